"""How to repeat the run of a record: the pins, the launch, the prompts, and the command. Pure but for reading it."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct

from kvtrial.analysis.campaign import Campaign, read_campaign, whole_record
from kvtrial.analysis.commandline import REDACTED
from kvtrial.analysis.protocols import is_path
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, PoissonPlan, TracePlan, files_of_traces
from kvtrial.record.record import RunRecord
from kvtrial.record.store import PACKED_RECORD, RECORD, record_path


class Archive(Struct, frozen=True):
    """The tar archive (xz) of a campaign, seen from the project's root, and the folder that it lies in there."""

    path: str
    member: str


def read_record(path: Path) -> RunRecord:
    """A record, its digest checked. Raises UnusableInput if it is missing, damaged or newer."""
    path = record_path(path if path.is_dir() or path.name not in (RECORD, PACKED_RECORD) else path.parent)
    if not path.is_file():
        raise UnusableInput(f"{path} is no record; give a run's folder, results/CAMPAIGN/runs/HOST/RUN.")
    return whole_record(path)


def reproduce(path: Path) -> list[str]:
    """Lines that say how to do the run of a record again, and what it measured then."""
    record = read_record(path)
    resolved = record.resolved
    directory = _campaign_directory(path)
    campaign = read_campaign(directory) if directory else None
    lines = [
        f"# run {record.run} of campaign {record.campaign}, host {record.host}, arm {record.arm}, pair {record.pair}",
        f"# evidence {record.evidence}; outcome {record.outcome}; attempt {record.attempt}",
        f"# kvtrial {record.kvtrial_version}, {_commit(campaign)}",
        f"# vLLM {record.vllm_version_pinned}, installed packages sha256 "
        f"{resolved.packages_sha256 if resolved else 'unknown'}",
        f"# model {record.model.name}, revision {record.model.revision}, weights {record.model.weights}",
        f"# {record.conditions.cpu_model}, {record.conditions.cpus} CPUs, kernel {record.conditions.kernel}, driver "
        f"{record.conditions.driver_version or 'none'}",
        "",
        "# the whole campaign, same seed and prompts, with the inventory of that campaign:",
        *(
            _again(record, directory, campaign).splitlines()
            if directory and campaign
            else [
                _campaign_command(record, directory, campaign),
                *(f"# not in this command: {what}" for what in _not_carried(record, campaign)),
            ]
        ),
        "",
        "# this arm's engine alone:" if not record.launch.also else "# this arm's engines alone, one a line:",
        *(
            " ".join([*(f"{key}={shlex.quote(value)}" for key, value in engine.env.items()), shlex.join(engine.argv)])
            for engine in record.launch.engines()
        ),
        "",
        "# what it measured then (median time to first token, seconds):",
    ]
    for phase in record.phases:
        ttft = "none" if phase.ttft_median_seconds is None else f"{phase.ttft_median_seconds:.4f}"
        lines.append(f"#   {phase.name:16} {phase.sent:4d} requests  {ttft}  prompts {phase.prompts_sha256[:12]}")
    return lines


def commands_of(
    directory: Path,
    campaign: Campaign,
    records: Sequence[RunRecord],
    language: str,
    arguments: Sequence[str],
    archives: Mapping[Path, Archive] | None = None,
) -> dict[str, str]:
    """What a report's reader may copy, given at the project's root: campaign, run, verdict and report again.

    Comments (#) say what a command does not carry. `arguments`: further ones of kvtrial report. `archives`: what
    this and other campaigns are kept in, by folder, where a reader has to unpack them first.
    """
    place = shlex.quote(_seen_from_the_root(directory))
    found = {}
    if archives:
        found["unpack"] = "\n".join(_unpack(folder, archive) for folder, archive in archives.items())
    if records:
        first = records[0]
        run = f"{first.host}/{first.run}"
        found["campaign"] = _again(first, directory, campaign)
        found["run"] = (
            f".venv/bin/kvtrial reproduce {place}/runs/{shlex.quote(run)}/{record_path(directory / 'runs' / run).name}"
        )
    elif campaign.command:
        found["campaign"] = _typed(campaign)
    more = shlex.join(["--lang", language, *(_seen_from_the_root(Path(word)) if Path(word).exists() else word
                                             for word in arguments)])  # fmt: skip
    return found | {
        "verdict": f".venv/bin/kvtrial analyze {place}",
        "report": f".venv/bin/kvtrial report {place} {more}",
    }


def _unpack(folder: Path, archive: Archive) -> str:
    """The folder in the archive is named: it may hold more than the campaign."""
    place = shlex.quote(_seen_from_the_root(folder))
    folders = len(PurePosixPath(archive.member).parts)
    return (
        f"mkdir -p {place} && tar -xJf {shlex.quote(archive.path)} -C {place} --strip-components={folders} "
        f"{shlex.quote(archive.member)}"
    )


def _again(record: RunRecord, directory: Path, campaign: Campaign) -> str:
    """The command of the campaign as it was typed, else as campaign.json tells it, with what that leaves out."""
    if campaign.command:
        return _typed(campaign)
    said = [_campaign_command(record, Path(_seen_from_the_root(directory)), campaign)]
    return "\n".join([*said, *(f"# not in this command: {what}" for what in _not_carried(record, campaign))])


def _typed(campaign: Campaign) -> str:
    """The command as it was typed, with the seed that it had, as a new campaign."""
    seed = (
        [] if any("kvtrial_seed" in word for word in campaign.command) else ["-e", f"kvtrial_seed={campaign.plan.seed}"]
    )
    said = shlex.join([*campaign.command, *seed, "-e", "kvtrial_new_campaign=true"])
    return f"{said}\n# put back what says {REDACTED}" if REDACTED in said else said


def _seen_from_the_root(path: Path) -> str:
    """A path as it is named at the project's root; whole where it lies in no project."""
    whole = path.resolve()
    root = next((parent for parent in whole.parents if (parent / "experiment.yml").is_file()), None)
    return str(whole if root is None else whole.relative_to(root))


def _campaign_directory(path: Path) -> Path | None:
    """The folder of the campaign that a record lies in; None where it was taken out of it."""
    return next((parent for parent in path.resolve().parents if (parent / "campaign.json").is_file()), None)


def _commit(campaign: Campaign | None) -> str:
    """The project's commit when the campaign was made, in words."""
    project = (campaign.provenance.get("project") if campaign else None) or {}
    if not project.get("commit"):
        why = "not kept: it ran from no git checkout" if campaign else "not known: campaign.json is not beside it"
        return f"the project's commit is {why}"
    return f"commit {project['commit']}{', with changes that were not committed' if project.get('dirty') else ''}"


def _campaign_command(record: RunRecord, directory: Path | None, campaign: Campaign | None) -> str:
    """The playbook command with what was set, as far as campaign.json is still beside the record."""
    asked = campaign.asked if campaign else None
    # A name is the one that a trace or a share chose; a file outside the project is known by its path alone.
    protocol = asked.protocol if asked and is_path(asked.protocol) else record.protocol
    words = [".venv/bin/ansible-playbook", "experiment.yml", "-e", f"protocol={protocol}"]
    if directory and campaign:
        plan = campaign.plan
        host = next((host for host in plan.hosts if host.host == record.host), plan.hosts[0])
        pairs = len({run.pair for run in host.runs if not run.spare})
        words += ["-e", f"kvtrial_seed={plan.seed}", "-e", f"kvtrial_pairs={pairs}"]
        # JSON, because key=value would make every size a string.
        chosen = {
            "kvtrial_arms": [arm for arm in plan.protocol.arms if arm != plan.protocol.control],
            "kvtrial_hosts": ",".join(host.host for host in plan.hosts),
            **({} if "sizes" in _differing(campaign) else {"kvtrial_sizes": plan.protocol.sizes}),
            **{f"kvtrial_{name}": value for name, value in _settings(campaign).items()},
        }
        words += ["-e", json.dumps(chosen, sort_keys=True)]
        words += _trace_words(host, directory, plan.protocol.sizes)
    return shlex.join([*words, "-e", "kvtrial_new_campaign=true"])


def _settings(campaign: Campaign) -> dict[str, Any]:
    """What one command can set: of the request, and of the hosts what is the same on all of them."""
    if campaign.asked is None:
        versions = {host.vllm_version for host in campaign.plan.hosts}
        return {"vllm_version": versions.pop()} if len(versions) == 1 else {}
    first = next(iter(campaign.asked.hosts.values()))
    # All of the protocol's sizes are given anyway.
    alike = {name: value for name, value in first.items() if name not in {"sizes", *_differing(campaign)}}
    if "engine_env" in alike:
        places = _places_of_hosts(campaign)
        alike["engine_env"] = {name: value for name, value in alike["engine_env"].items() if name not in places}
    if limits := alike.get("limits"):
        alike["limits"] = {name: int(value) if value == int(value) else value for name, value in limits.items()}
    return {**alike, **campaign.asked.request}


def _places_of_hosts(campaign: Campaign) -> list[str]:
    """Variables of the engine's environment that name a path: another host, or another clone, has other ones."""
    found = {
        name
        for host in (campaign.asked.hosts.values() if campaign.asked else ())
        for name, value in (host.get("engine_env") or {}).items()
        if str(value).startswith("/")
    }
    return sorted(found)


def _differing(campaign: Campaign) -> list[str]:
    """Settings in which the hosts of a campaign differ; a command line sets them on all hosts alike."""
    hosts = list(campaign.asked.hosts.values()) if campaign.asked else []
    return [name for name in (hosts[0] if hosts else {}) if any(host.get(name) != hosts[0][name] for host in hosts)]


def _not_carried(record: RunRecord, campaign: Campaign | None) -> list[str]:
    """What the command leaves to the inventory and to whoever types it."""
    if campaign is None:
        return [
            "seed, pairs, arms, sizes and settings of the engine: campaign.json is not beside the record; put the "
            "run's folder back under results/CAMPAIGN/runs/HOST/"
        ]
    said = ["the inventory: add the -i that the campaign had, unless it was the default (inventories/local)"]
    asked = campaign.asked
    if asked is not None and (places := _places_of_hosts(campaign)):
        said.append(f"paths on the host in kvtrial_engine_env ({', '.join(places)}); add yours, if you need them")
    if asked is None:
        said.append(
            "settings of the engine (kvtrial_engine_args, kvtrial_engine_env, kvtrial_connector_extra_config) and of a "
            "ladder that were given with -e, and the path of a protocol given by path: this campaign was made before "
            "they were kept; compare with the launch below, and add them"
        )
    else:
        if is_path(asked.protocol) and not Path(asked.protocol).is_file():
            said.append(f"the protocol's file {asked.protocol}, which is not there any more; put it back")
        if odd := _differing(campaign):
            said.append(f"what hosts differ in ({', '.join(f'kvtrial_{name}' for name in odd)}); the inventory has it")
    if len(files_of_traces(campaign.plan.hosts[0])) > 1:
        said.append("the traces that were replayed, which the protocol names")
    said.append(
        f"the model ({record.model.name}, revision {record.model.revision}) and other variables of the model and of "
        "roles (kvtrial_model_…, kvtrial_smaller_model, vllm_…, model_…); if they were given with -e, add them"
    )
    return said


def _trace_words(host: HostPlan, directory: Path, sizes: dict[str, int]) -> list[str]:
    """What names the trace that was replayed, as the campaign keeps it; nothing for a protocol that names several."""
    traces = files_of_traces(host)
    if len(traces) != 1:
        return []
    words = ["-e", f"kvtrial_trace={directory / next(iter(traces))}"]
    phases = [phase for phase in host.runs[0].phases if isinstance(phase.workload, TracePlan)]
    if "arrivals_per_minute" in sizes and any(isinstance(phase.arrivals, PoissonPlan) for phase in phases):
        words += ["-e", f"kvtrial_arrivals_per_minute={sizes['arrivals_per_minute']}"]
    return words
