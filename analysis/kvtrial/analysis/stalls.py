"""When requests of a ladder stalled or waited, of records that don't say it: from the requests' times."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import read_results
from kvtrial.record.pressure import LISTED_STALLS_MAX, PhaseLedger, RequestTimes, passed_by_others, stalls_of
from kvtrial.record.record import PhaseRecord, RunRecord

REQUESTS_FILE = "requests.jsonl.zst"
MOST_REQUESTS = 100_000
"""Beyond which the requests of an older record are not read: their tokens would not fit into memory."""


def with_stalls(record: RunRecord, directory: Path) -> RunRecord:
    """The record with the stalls and waits of each ledger that lacks them, where the folder still has its requests.

    Raises UnusableInput where that file is damaged, or holds other requests than the ledger counted.
    """
    lacking = {phase.name for phase in record.phases if _lacks(phase.ledger)}
    path = directory / REQUESTS_FILE
    if not lacking or sum(phase.sent for phase in record.phases) > MOST_REQUESTS or not path.is_file():
        return record
    times: dict[str, list[RequestTimes]] = {name: [] for name in lacking}
    try:
        for fields in read_results(path):
            if fields["phase"] in lacking and (one := _times(fields)) is not None:
                times[fields["phase"]].append(one)
    except (KeyError, TypeError, ValueError) as error:
        raise UnusableInput(f"{path} does not hold requests of this kvtrial ({error!r}).") from None
    return replace(record, phases=[_with(phase, times.get(phase.name), path) for phase in record.phases])


def _lacks(ledger: PhaseLedger | None) -> bool:
    return ledger is not None and None in (ledger.stalls_at, ledger.waits) and ledger.stall_above_ns > 0


def _with(phase: PhaseRecord, times: list[RequestTimes] | None, path: Path) -> PhaseRecord:
    if times is None or phase.ledger is None:
        return phase
    found = list(stalls_of(times, phase.ledger.stall_above_ns))
    if (len(times), len(found)) != (phase.ledger.counted, phase.ledger.stalls):
        raise UnusableInput(
            f"{path} holds {len(times)} requests of {phase.name} with {len(found)} stalls, its record counts "
            f"{phase.ledger.counted} with {phase.ledger.stalls}; restore the file that was recorded."
        )
    waits, passed_by = passed_by_others(times, phase.ledger.run_median_gap_ns)
    return replace(
        phase,
        ledger=replace(phase.ledger, stalls_at=found[:LISTED_STALLS_MAX], waits=waits, passed_by=passed_by),
    )


def _times(fields: dict[str, Any]) -> RequestTimes | None:
    """A result's times, None where it is not whole."""
    if fields["error"] is not None or None in (fields["sent_ns"], fields["first_token_ns"], fields["last_token_ns"]):
        return None
    return RequestTimes(
        key=fields["key"],
        due_ns=fields["scheduled_ns"],
        sent_ns=fields["sent_ns"],
        first_token_ns=fields["first_token_ns"],
        last_token_ns=fields["last_token_ns"],
        gaps_us=fields["token_gaps_us"],
    )
