"""The answer as lines for people."""

from kvtrial.analysis.launch_arm import ended
from kvtrial.analysis.observe.answer import Answer
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.words import listed

_SURENESS = {"seen": "", "inferred": " (inferred)", "unknown": " (not to be known from this)"}


def lines_of(answer: Answer) -> list[str]:
    """One paragraph a finding: class, sentence, what to do; then hazards, the experiment and notes."""
    said = [head(answer)]
    said += [paragraph(finding) for finding in answer.findings]
    here = [hazard for hazard in answer.hazards if hazard.state != "possible"]
    shown = [hazard for hazard in here if hazard.state == "seen" or hazard.about != "reading"]
    if shown:
        said.append("Known defects that this version and configuration meet (seen, applies, guarded):")
        said += [
            f"  {hazard.state:7}  {hazard.id}: {hazard.title} [{hazard.source}]"
            + (f" ({hazard.evidence})" if hazard.state == "seen" else "")
            for hazard in shown
        ]
    possible, readings = len(answer.hazards) - len(here), len(here) - len(shown)
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
        f"{server['window_seconds']:g} s" if server.get("window_seconds") else "",
    ]
    of = ", ".join(part for part in parts if part)
    return f"{answer.verdict}: {answer.class_ or 'nothing to say'}" + (f" ({of})" if of else "")


def paragraph(finding: Finding) -> str:
    """A finding as text."""
    about = f" [{finding.about}]" if finding.about else ""
    return f"- {finding.class_}{about}{_SURENESS[finding.confidence]}: {ended(finding.reason)}\n  Do: {finding.do}"
