"""The section on checks: gates, failed ones first, each explained; dropped pairs and faults of the engine. Pure."""

from collections.abc import Sequence

from kvtrial.analysis import answer
from kvtrial.analysis.report.said import is_said, said_text
from kvtrial.analysis.report.selection import HOSTS_SHOWN_MAX, Row, clipped
from kvtrial.analysis.report.words import Words
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import Verdict

GATE_HOSTS_SHOWN_MAX = 5


def gate_rows(verdict: Verdict, words: Words) -> list[Row]:
    """A row a gate: state, hosts that passed, its numbers; its meaning is the note."""
    rows = []
    for name, results in answer.gates_by_name(verdict).items():
        state = answer.gate_state([result for _, result in results])
        telling = [(host, result) for host, result in results if not result.holds] or results
        hosts = len(results)
        details = []
        for host, result in telling[: GATE_HOSTS_SHOWN_MAX if state != "passed" else 1]:
            detail = clipped(result.detail)
            details.append(f"{host}: {detail}" if host and hosts > 1 else detail)
        left_out = len(telling) - len(details)
        if left_out > 0:
            details.append(words("gates.more_hosts", count=words.whole(left_out)))
        passed = sum(result.passed is True for _, result in results)
        numbers = words("of", part=passed, whole=hosts) if hosts > 1 else ""
        meaning = words.or_else(f"gate.{name}", "")
        if meaning and state != "passed":
            meaning = words("gates.asked", meaning=meaning)
        rows.append(Row(name, [words(f"state.{state}"), numbers, "\n".join(details)], kind=state, note=meaning))
    return rows


def fault_rows(records: Sequence[RunRecord], words: Words) -> list[Row]:
    """Runs that did not complete, with what is known of the cause; faults of the engine first."""
    rows = []
    for record in records:
        fault = record.fault
        if fault is None:
            continue
        place = f"{fault.fault}, {fault.origin}" + (f", {words('phase')} {fault.phase}" if fault.phase else "")
        parts = [fault.detail]
        parts += [words("faults.cause", said=_in_words(fault.cause, words))] if fault.cause else []
        parts += [words("faults.fix", said=_in_words(fault.fix, words))] if fault.fix else []
        log = "\n".join(answer.one_line(line, 300) for line in fault.log_tail[-12:])
        cells = [record.arm, place, clipped(" ".join(map(answer.sentence, parts)))]
        rows.append(Row(f"{record.host} / {record.run}", cells, kind=record.outcome, note=log))
    return sorted(rows, key=lambda row: row.kind != "engine_fault")[:HOSTS_SHOWN_MAX]


def _in_words(text: str, words: Words) -> str:
    """What is known of a fault, in the page's language; in English, which the page marks, where it has no words."""
    line = answer.sentence(text)
    return said_text(line, words) if is_said(line, words) else text


def faults_left_out(records: Sequence[RunRecord], words: Words) -> str:
    """How many more runs did not complete than the table has room for; "" where it has all."""
    more = sum(record.fault is not None for record in records) - HOSTS_SHOWN_MAX
    return words("faults.left_out", runs=words.count(more, "run")) if more > 0 else ""
