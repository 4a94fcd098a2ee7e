"""Checks of a launch before anything is started: both arms' arguments against a version and a host's facts.

Pure: mappings in, findings out. Numbers are in bytes, tokens and blocks. What a version takes is data
(`kvtrial.record`, connector_keys.yml, cuda.yml, models.yml, hazards.yml).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from kvtrial.analysis.check_arms import check_comparable, check_exposure
from kvtrial.analysis.check_connector import check_connector
from kvtrial.analysis.check_host import check_host
from kvtrial.analysis.check_options import check_options
from kvtrial.analysis.check_sizes import check_sizes, length_not_checked
from kvtrial.analysis.launch_arm import Arm, Backend, Finding, read_arm
from kvtrial.analysis.launch_file import OTHER_PLATFORMS, refuse_unreadable
from kvtrial.record.hazardfacts import host_facts, launch_facts
from kvtrial.record.hazards import facts_seen, hazards_for
from kvtrial.record.launch import parse_vllm_args
from kvtrial.record.versions import hazards_not_read, outside_read_range, release

__all__ = ["CheckAnswer", "Finding", "answer_of", "check_launches", "not_checked", "parse_vllm_args", "unusable"]

_HOST_FACTS = ("python", "glibc", "driver_version", "ram_available_bytes", "dev_shm_free_bytes")
_OF_GPU_HOSTS = {"glibc", "driver_version", "dev_shm_free_bytes"}
"""What the checks of the CPU engine never ask."""


class CheckAnswer(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """What check says of a launch file. `class_`: of the first finding; `notes`: what was not checked, and why."""

    schema_version: int
    verdict: Literal["report", "INVALID", "error"]
    class_: str | None
    findings: list[Finding]
    notes: list[str] = []

    @property
    def refused(self) -> bool:
        """Whether the launches must not be started."""
        return self.verdict == "INVALID"


def answer_of(launch: Mapping[str, Any]) -> CheckAnswer:
    """The answer to a launch file's mapping with host, vllm and arms. Raises UnusableInput."""
    findings = check_launches(launch["host"], launch["vllm"], launch["arms"], launch.get("model"))
    version = str(launch["vllm"]["version"])
    notes = [note for note in (outside_read_range(version), hazards_not_read(version), *not_checked(launch)) if note]
    return CheckAnswer(
        1,
        "INVALID" if any(finding.severity == "refuse" for finding in findings) else "report",
        findings[0].class_ if findings else None,
        findings,
        notes,
    )


def unusable(sentence: str) -> CheckAnswer:
    """The answer where the file can't be used."""
    do = "Mend the input and type the same again."
    return CheckAnswer(1, "error", "unusable_input", [Finding("unusable_input", "refuse", None, sentence, {}, do)])


def check_launches(
    host: Mapping[str, Any],
    vllm: Mapping[str, Any],
    arms: Mapping[str, Mapping[str, Any]],
    model: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """Findings on the arms of a trial, refusals first; none means nothing known speaks against starting it.

    host: facts such as driver_version, glibc, python, gpu_memory_mib, ram_available_bytes, dev_shm_free_bytes; what is
    absent is not checked, rocm and xpu say that there is another GPU; ram_reserve_bytes is to stay free (absent: the
    larger of 8 GiB and a tenth). vllm: `version`, and optionally `backend` (cuda or cpu), `source`, `cuda`. arms: name
    -> {args: [...], env: {...}}; the first, or the one named control, is what the others are held against. model:
    `kv_bytes_per_token`. Raises UnusableInput where these can't be read.
    """
    refuse_unreadable(host, vllm, arms, model)
    version = str(vllm["version"])
    release(version)
    if platform := OTHER_PLATFORMS.get(vllm.get("backend", "cuda")):
        return [_platform_unsupported(f"vllm.backend={vllm['backend']} is {platform}", {"backend": vllm["backend"]})]
    backend: Backend = "cpu" if vllm.get("backend") == "cpu" else "cuda"
    read = [read_arm(name, spec, version, backend, model) for name, spec in arms.items()]
    findings = list(_check_platform(host, backend))
    findings += check_host(host, vllm, version, backend)
    for arm in read:
        findings += check_connector(arm)
        findings += check_sizes(arm, host)
        findings += check_exposure(arm)
        findings += check_options(arm)
    findings += check_comparable(read)
    said = {finding.class_ for finding in findings}
    findings += _check_hazards(read, version, backend, said)
    findings += _hazards_at_hand(read, version, backend, host, said)
    return sorted(findings, key=lambda finding: finding.severity != "refuse")


def not_checked(launch: Mapping[str, Any]) -> list[str]:
    """Sentences on what a launch's file lacks, so that nothing was judged by it. The launch was checked already."""
    backend: Backend = "cpu" if launch["vllm"].get("backend") == "cpu" else "cuda"
    if launch["vllm"].get("backend") in OTHER_PLATFORMS:
        return []
    asked = [name for name in _HOST_FACTS if not (backend == "cpu" and name in _OF_GPU_HOSTS)]
    absent = [name for name in asked if launch["host"].get(name) is None]
    said = [f"Not checked, since host does not state it: {', '.join(absent)}."] if absent else []
    version, model = str(launch["vllm"]["version"]), launch.get("model")
    arms = [read_arm(str(name), spec, version, backend, model) for name, spec in launch["arms"].items()]
    # Said once: arms that differ in their tier alone lack the same.
    return said + list(dict.fromkeys(text for arm in arms if (text := length_not_checked(arm, launch["host"]))))


def _check_platform(host: Mapping[str, Any], backend: Backend) -> Iterator[Finding]:
    """Findings on accelerators that a CUDA build can't use; to the CPU engine they are no matter."""
    there = [name for name in OTHER_PLATFORMS if host.get(name)] if backend == "cuda" else []
    for name in there:
        yield _platform_unsupported(f"host.{name} is true: the host has {OTHER_PLATFORMS[name]}", {name: True})


def _platform_unsupported(reason: str, numbers: dict[str, Any]) -> Finding:
    return Finding(
        "platform_unsupported",
        "refuse",
        None,
        f"{reason}; settings are tried on NVIDIA GPUs (cuda) and on the CPU engine (cpu) alone.",
        numbers,
        "Take a host with an NVIDIA GPU, or vllm.backend: cpu.",
    )


def _check_hazards(arms: list[Arm], version: str, backend: Backend, said: set[str]) -> Iterator[Finding]:
    """Findings on known defects, but for those that another check has `said` already, by its class."""
    launches = {arm.name: arm.launch for arm in arms}
    for hit in hazards_for(version, launches, backend, concerns=("offload",)):
        if hit.action == "watch" or hit.guarded or hit.hazard.said_as in said:
            continue
        guard = hit.hazard.guard
        yield Finding(
            "version_hazard" if hit.action == "block" else "version_hazard_unguarded",
            "refuse" if hit.action == "block" else "warn",
            ", ".join(hit.applies_to_arms),
            f"vLLM {version}: {hit.detail} {hit.hazard.symptom}",
            {"hazard": hit.hazard.id, "since": hit.hazard.since, "until": hit.hazard.until},
            f"Set {' '.join(guard.args)} in all arms." if guard else hit.hazard.do,
        )


def _hazards_at_hand(
    arms: list[Arm], version: str, backend: Backend, host: Mapping[str, Any], said: set[str]
) -> Iterator[Finding]:
    """Findings on defects that are watched for and that the host's facts show before anything is started."""
    of_host = host_facts(host)
    for arm in arms:
        launch = launch_facts(arm.launch, version, backend).also(of_host)
        for hit in hazards_for(version, {arm.name: arm.launch}, backend):
            shown = facts_seen(hit.hazard, launch) if hit.action == "watch" else ""
            if shown and hit.hazard.said_as not in said:
                yield Finding(
                    "version_hazard_at_hand",
                    "warn",
                    arm.name,
                    f"vLLM {version}: {hit.hazard.title} ({hit.hazard.source}): {shown}.",
                    {"hazard": hit.hazard.id},
                    hit.hazard.do,
                )
