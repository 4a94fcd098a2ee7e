"""How to repeat the run of a record: the pins, the launch, the prompts, and the command. Pure but for reading it."""

import json
import shlex
from pathlib import Path

import msgspec

from kvtrial.analysis.campaign import check_digests, read_campaign
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan, PoissonPlan, TracePlan, files_of_traces
from kvtrial.record.record import RunRecord
from kvtrial.record.version import refuse_newer


def read_record(path: Path) -> RunRecord:
    """A record, its digest checked. Raises UnusableInput if it is missing, damaged or newer."""
    path = path / "record.json" if path.is_dir() else path
    if path.name != "record.json" or not path.is_file():
        raise UnusableInput(f"{path} is no record; give results/CAMPAIGN/runs/HOST/RUN/record.json.")
    check_digests(path.parent)
    try:
        raw = path.read_bytes()
        refuse_newer(str(msgspec.json.decode(raw)["schema_version"]), str(path))
        return msgspec.json.decode(raw, type=RunRecord)
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise UnusableInput(f"{path} is not a record of this kvtrial ({error}).") from None


def reproduce(path: Path) -> list[str]:
    """Lines that say how to do the run of a record again, and what it measured then."""
    record = read_record(path)
    resolved = record.resolved
    lines = [
        f"# run {record.run} of campaign {record.campaign}, host {record.host}, arm {record.arm}, pair {record.pair}",
        f"# evidence {record.evidence}; outcome {record.outcome}; attempt {record.attempt}",
        f"# kvtrial {record.kvtrial_version}; vLLM {record.vllm_version_pinned}, installed packages sha256 "
        f"{resolved.packages_sha256 if resolved else 'unknown'}",
        f"# model {record.model.name}, revision {record.model.revision}, weights {record.model.weights}",
        f"# {record.conditions.cpu_model}, {record.conditions.cpus} CPUs, kernel {record.conditions.kernel}, driver "
        f"{record.conditions.driver_version or 'none'}",
        "",
        "# the whole campaign, same seed and prompts, with the inventory of that campaign; add its -i:",
        _campaign_command(path, record),
        "",
        "# this arm's engine alone:",
        " ".join(f"{key}={shlex.quote(value)}" for key, value in record.launch.env.items())
        + " "
        + shlex.join(record.launch.argv),
        "",
        "# what it measured then (median time to first token, seconds):",
    ]
    for phase in record.phases:
        ttft = "none" if phase.ttft_median_seconds is None else f"{phase.ttft_median_seconds:.4f}"
        lines.append(f"#   {phase.name:16} {phase.sent:4d} requests  {ttft}  prompts {phase.prompts_sha256[:12]}")
    return lines


def _campaign_command(path: Path, record: RunRecord) -> str:
    """The playbook command with what was set, as far as campaign.json is still beside the record."""
    words = [".venv/bin/ansible-playbook", "experiment.yml", "-e", f"protocol={record.protocol}"]
    for parent in path.resolve().parents:
        if (parent / "campaign.json").is_file():
            plan = read_campaign(parent).plan
            host = next((host for host in plan.hosts if host.host == record.host), plan.hosts[0])
            pairs = len({run.pair for run in host.runs if not run.spare})
            words += ["-e", f"kvtrial_seed={plan.seed}", "-e", f"kvtrial_pairs={pairs}"]
            arms = [arm for arm in plan.protocol.arms if arm != plan.protocol.control]
            # JSON, because key=value would make every size a string.
            chosen = {"kvtrial_arms": arms, "kvtrial_sizes": plan.protocol.sizes}
            words += ["-e", json.dumps(chosen, sort_keys=True)]
            words += _trace_words(host, parent, plan.protocol.sizes)
            break
    return shlex.join([*words, "-e", "kvtrial_new_campaign=true"])


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
