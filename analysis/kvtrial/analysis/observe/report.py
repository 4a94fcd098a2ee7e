"""The answer as lines for people."""

from kvtrial.analysis.launch_arm import ended
from kvtrial.analysis.observe.answer import Answer
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed, seconds

GIB = 2**30
_SURENESS = {"seen": "", "inferred": " (inferred)", "unknown": " (not to be known from this)"}


def lines_of(answer: Answer) -> list[str]:
    """One paragraph a finding: class, sentence, what to do; then hazards, the experiment and notes."""
    said = [head(answer)]
    said += host_line(answer)
    said += [paragraph(finding) for finding in answer.findings]
    shown = [hazard for hazard in answer.hazards if hazard.state == "seen" or hazard.about != "reading"]
    if shown:
        said.append("Known defects that this version and configuration meet (seen, applies, guarded):")
        said += [
            f"  {hazard.state:7}  {hazard.id}: {hazard.title} [{hazard.source}]"
            + (f" ({hazard.evidence})" if hazard.state == "seen" else "")
            for hazard in shown
        ]
    possible, readings = len(answer.hazards_possible), len(answer.hazards) - len(shown)
    if possible or readings:
        more = [f"{readings} that only mislead a reader" if readings else ""]
        more.append(f"{possible} that may apply (--config or --host says whether)" if possible else "")
        said.append(
            f"And {' and '.join(part for part in more if part)}: `kvtrial hazards --vllm "
            f"{answer.server.get('version')}`."
        )
    if answer.settle is not None:
        said.append(f"Open: {answer.settle.question} {answer.settle.where}\n  {answer.settle.command}")
    said += [f"Note: {note}" for note in answer.notes]
    return said


def head(answer: Answer) -> str:
    """What was looked at, in one line."""
    server = answer.server
    models = listed([repr(name) for name in server.get("models", []) if name])
    version = server.get("version")
    parts = [
        f"vLLM {version}"
        if version
        else f"vLLM {server['versions_by_page']}"
        if server.get("versions_by_page")
        else "",
        models,
        f"{server['pages']} pages" if server.get("pages", 0) > 1 else "one page" if server.get("pages") else "",
        seconds(server["window_seconds"]) if server.get("window_seconds") else "",
    ]
    of = ", ".join(part for part in parts if part)
    return f"{answer.verdict}: {answer.class_ or 'nothing to say'}" + (f" ({of})" if of else "")


def host_line(answer: Answer) -> list[str]:
    """The host in one line, as far as its facts were given."""
    server = answer.server
    parts = [f"driver {server['driver_version']}" if server.get("driver_version") else ""]
    for gpu in server.get("gpus", []):
        if gpu.get("vram_total_bytes"):
            used = f"{gpu['vram_used_bytes'] / GIB:.1f} of " if gpu.get("vram_used_bytes") is not None else ""
            parts.append(f"{gpu['name']} {used}{gpu['vram_total_bytes'] / GIB:.1f} GiB used")
    for name, first, second, words in (
        ("RAM", "ram_available_bytes", "ram_total_bytes", "available"),
        ("/dev/shm", "dev_shm_free_bytes", "dev_shm_total_bytes", "free"),
        ("cgroup", "cgroup_used_bytes", "cgroup_limit_bytes", "used"),
    ):
        if server.get(first) is not None and server.get(second) is not None:
            parts.append(f"{name} {server[first] / GIB:.1f} of {server[second] / GIB:.1f} GiB {words}")
    known = [part for part in parts if part]
    return [f"host {server.get('host') or ''}: {', '.join(known)}".replace("host :", "host:")] if known else []


def paragraph(finding: Finding) -> str:
    """A finding as text."""
    about = f" [{finding.about}]" if finding.about else ""
    return f"- {finding.class_}{about}{_SURENESS[finding.confidence]}: {ended(finding.reason)}\n  Do: {finding.do}"
