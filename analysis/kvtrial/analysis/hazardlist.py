"""The list of known defects that `kvtrial hazards` prints: of a version, or of launches in it. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvtrial.analysis.launch_arm import Backend, ended, read_arm
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import Hazard, HazardHit, hazards_for
from kvtrial.record.predicates import Facts
from kvtrial.record.versions import release

_OF_MODELS = ("kv_cache_groups",)


def hits_of_file(
    version: str | None, config: Mapping[str, Any] | None, path: str
) -> tuple[str, list[HazardHit] | None]:
    """The version, and what the launches of a file meet in it; None without a file.

    The file is one of `kvtrial check` (vllm, arms and the like), or a single launch (args, env). A version that is
    given counts before the file's: so an upgrade can be looked at. Raises UnusableInput.
    """
    if config is None:
        if version is None:
            raise UnusableInput("No version is given; give --vllm 0.32.0, or --config with a launch that names one.")
        release(version)
        return version, None
    vllm = config.get("vllm") or {}
    arms = config.get("arms") or ({"server": config} if "args" in config else {})
    if not isinstance(vllm, Mapping) or not isinstance(arms, Mapping) or not arms:
        raise UnusableInput(
            f"{path} holds no launches; give arms (name: {{args: [...], env: {{...}}}}), or args and env of one server."
        )
    known = version or vllm.get("version")
    if known is None:
        raise UnusableInput(f"{path} names no vllm.version; add it, or give --vllm.")
    release(str(known))
    backend: Backend = "cpu" if vllm.get("backend") == "cpu" else "cuda"
    model = config.get("model")
    model = model if isinstance(model, Mapping) else {}
    launches = {}
    for name, spec in arms.items():
        if not isinstance(spec, Mapping):
            raise UnusableInput(f"Arm {name}: {spec!r} is not a mapping; give it as {{args: [...], env: {{...}}}}.")
        launches[str(name)] = read_arm(str(name), spec, str(known), backend, None).launch
    of_model = Facts({name: model[name] for name in _OF_MODELS if name in model})
    return str(known), hazards_for(str(known), launches, backend, known=of_model)


def describe(version: str, known: list[Hazard], hits: list[HazardHit] | None) -> Iterator[str]:
    """Lines for people: an entry each with its source; of launches also what shows it and what avoids it."""
    if hits is None:
        yield from (f"{hazard.action:5}  {hazard.id}: {hazard.title} [{hazard.source}]" for hazard in known)
        return
    yield from map(_line, hits)
    blocked = sum(hit.action == "block" or (hit.action == "guard" and not hit.guarded) for hit in hits)
    yield (
        f"vLLM {version}: {len(hits)} of {len(known)} known defects and traps concern these launches, "
        f"{blocked or 'none'} of them forbid{'s' if blocked == 1 else ''} a trial."
    )


def _line(hit: HazardHit) -> str:
    hazard = hit.hazard
    word = "ok" if hit.guarded else hit.action
    do = "Its guard is set in every launch." if hit.guarded else ended(hazard.do)
    where = ", ".join(hit.applies_to_arms)
    return f"{word:5}  {hazard.id} ({where}): {ended(hazard.title)} {ended(hazard.symptom)} {do} [{hazard.source}]"
