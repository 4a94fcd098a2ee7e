"""One phase of a run: a settled scrape, the load, a settled scrape, and the facts of it."""

import hashlib
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from msgspec import Struct

from kvtrial.host.client import run_load_blocking
from kvtrial.host.workload import load_spec
from kvtrial.record.errors import UnusableInput
from kvtrial.record.exposition import parse_page, read_page
from kvtrial.record.load import LoadOutcome, RequestResult
from kvtrial.record.plan import Launch, Limits, PhasePlan
from kvtrial.record.record import PhaseRecord, RequestFact
from kvtrial.record.store import write_atomically

SETTLE_GAP_SECONDS = 0.05
SETTLE_LIMIT_SECONDS = 2.0
SCRAPE_TIMEOUT_SECONDS = 10.0
LISTED_REQUESTS_MAX = 1000


class Scrape(Struct, frozen=True):
    """A settled page: its text, the roles read from it, caveats, and how long it took, seconds."""

    text: str
    values: dict[str, float | None]
    caveats: list[str]
    seconds: float


def settled_scrape(base_url: str, vllm_version: str, model: str) -> Scrape:
    """Scrape /metrics until two pages agree on every engine line, or the limit passes (then with a caveat).

    The engine counts some transfers one step late, so a single page after a phase may lack the last store. Raises
    httpx.HTTPError if the engine does not answer.
    """
    started = time.monotonic()
    caveats: list[str] = []
    with httpx.Client(base_url=base_url, timeout=SCRAPE_TIMEOUT_SECONDS) as client:
        text = client.get("/metrics").raise_for_status().text
        while True:
            time.sleep(SETTLE_GAP_SECONDS)
            again = client.get("/metrics").raise_for_status().text
            if _engine_lines(again) == _engine_lines(text):
                break
            text = again
            if time.monotonic() - started > SETTLE_LIMIT_SECONDS:
                caveats.append(f"/metrics did not settle within {SETTLE_LIMIT_SECONDS} s")
                break
    try:
        reading = read_page(parse_page(again), vllm_version, model)
    except UnusableInput as error:
        return Scrape(again, {}, [str(error)], time.monotonic() - started)
    return Scrape(again, reading.values, caveats + reading.caveats, time.monotonic() - started)


def _engine_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("vllm:")]


def run_phase(
    phase: PhasePlan,
    launch: Launch,
    limits: Limits,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadOutcome:
    """Send the phase's load; never raises for what the engine does: failures are results."""
    return run_load_blocking(load_spec(phase, launch, limits), on_progress)


def phase_record(phase: PhasePlan, before: Scrape, after: Scrape, outcome: LoadOutcome) -> PhaseRecord:
    """The facts of a phase from its two scrapes and the client's results."""
    results = outcome.results
    finished = [r for r in results if r.error is None]
    ttfts = [seconds for r in finished if (seconds := ttft_seconds(r)) is not None]
    gaps = [gap / 1e6 for r in finished for gap in r.token_gaps_us]
    tokens = sum(r.output_tokens for r in results)
    return PhaseRecord(
        name=phase.name,
        block=phase.block,
        started_monotonic_seconds=outcome.started_monotonic_ns / 1e9,
        seconds=outcome.seconds,
        scrape_seconds=after.seconds,
        concurrency=phase.concurrency,
        prompts_sha256=hashlib.sha256("\n".join(r.prompt_sha256 for r in results).encode()).hexdigest(),
        sent=len(results),
        finished=len(finished),
        failed=len(results) - len(finished),
        errors=dict(Counter(r.error.error_class for r in results if r.error is not None)),
        output_tokens=tokens,
        ttft_median_seconds=statistics.median(ttfts) if ttfts else None,
        ttft_p95_seconds=percentile(ttfts, 0.95),
        inter_token_median_seconds=statistics.median(gaps) if gaps else None,
        inter_token_p95_seconds=percentile(gaps, 0.95),
        e2e_median_seconds=statistics.median(e2e) if (e2e := [s for r in finished if (s := e2e_seconds(r))]) else None,
        output_throughput_tokens_per_second=tokens / outcome.seconds if outcome.seconds > 0 else None,
        before=before.values,
        after=after.values,
        metrics_caveats=after.caveats,
        card=outcome.card,
        requests=[request_fact(r, phase.max_tokens) for r in results[:LISTED_REQUESTS_MAX]],
    )


def ttft_seconds(result: RequestResult) -> float | None:
    """Time to first token, from the scheduled send to the arrival of the first token id, seconds."""
    return None if result.first_token_ns is None else (result.first_token_ns - result.scheduled_ns) / 1e9


def e2e_seconds(result: RequestResult) -> float | None:
    """From the scheduled send to the last token, seconds."""
    return None if result.last_token_ns is None else (result.last_token_ns - result.scheduled_ns) / 1e9


def percentile(values: list[float], share: float) -> float | None:
    """The `share` quantile with linear interpolation (Hyndman-Fan type 7), None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def request_fact(result: RequestResult, max_tokens: int) -> RequestFact:
    """The short form of a request's result."""
    return RequestFact(
        key=result.key,
        prompt_sha256=result.prompt_sha256,
        prompt_tokens=result.prompt_tokens,
        max_tokens=max_tokens,
        ttft_seconds=ttft_seconds(result),
        e2e_seconds=e2e_seconds(result),
        longest_gap_seconds=max(result.token_gaps_us) / 1e6 if result.token_gaps_us else None,
        output_tokens=result.output_tokens,
        cached_tokens=result.cached_tokens,
        answer_sha256=result.answer_sha256,
        finish_reason=result.finish_reason,
        error_class=result.error.error_class if result.error else None,
    )


def write_scrapes(directory: Path, phase: str, before: Scrape, after: Scrape) -> None:
    """Write both pages as metrics/<phase>.{before,after}.prom."""
    directory.mkdir(exist_ok=True)
    write_atomically(directory / f"{phase}.before.prom", before.text.encode())
    write_atomically(directory / f"{phase}.after.prom", after.text.encode())
