"""One phase of a run: a settled scrape, the load, a settled scrape, and the facts of it."""

import statistics
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from kvtrial.host.affinity import Pinning
from kvtrial.host.load.client import run_load_blocking
from kvtrial.host.loopback import loopback_client
from kvtrial.host.workload import load_spec, phase_requests
from kvtrial.record.errors import UnusableInput
from kvtrial.record.exposition import NOT_SETTLED, metric_table, parse_page, read_page
from kvtrial.record.load import LoadOutcome, RequestResult, RequestSpec
from kvtrial.record.plan import ConstantPlan, Launch, Limits, PhasePlan, PoissonPlan, RecordedPlan
from kvtrial.record.record import OpenLoop, PhaseRecord, RequestFact
from kvtrial.record.store import write_atomically
from kvtrial.record.workload import concurrency_of, open_loop

SETTLE_GAP_SECONDS = 0.05
SETTLE_LIMIT_SECONDS = 2.0
SCRAPE_TIMEOUT_SECONDS = 10.0
LISTED_REQUESTS_MAX = 1000


class Scrape(Struct, frozen=True):
    """A settled page: its text, the roles read from it, caveats, and how long it took, seconds.

    Of an arm with several engines `texts` are the pages of the further ones, and the values those of all together.
    """

    text: str
    values: dict[str, float | None]
    caveats: list[str]
    seconds: float
    texts: list[str] = []


def settled_scrapes(base_urls: Sequence[str], vllm_version: str, model: str) -> Scrape:
    """`settled_scrape` of every engine of an arm, as one."""
    return together([settled_scrape(url, vllm_version, model) for url in base_urls])


def together(scrapes: Sequence[Scrape]) -> Scrape:
    """Several engines' scrapes as one: counts added up, shares the largest; None where one of them lacks the value."""
    first, *others = scrapes
    if not others:
        return first
    table = metric_table().values
    values: dict[str, float | None] = {}
    for role in first.values:
        found = [scrape.values.get(role) for scrape in scrapes]
        known = [value for value in found if value is not None]
        combine = max if role in table and table[role].across_engines == "max" else sum
        values[role] = combine(known) if len(known) == len(found) else None
    return Scrape(
        text=first.text,
        values=values,
        caveats=[caveat for scrape in scrapes for caveat in scrape.caveats],
        seconds=sum(scrape.seconds for scrape in scrapes),
        texts=[scrape.text for scrape in others],
    )


def settled_scrape(base_url: str, vllm_version: str, model: str) -> Scrape:
    """Scrape /metrics until two pages agree on every engine line, or the limit passes (then with a caveat).

    The engine counts some transfers one step late, so a single page after a phase may lack the last store. Raises
    httpx.HTTPError if the engine does not answer.
    """
    started = time.monotonic()
    caveats: list[str] = []
    with loopback_client(base_url, SCRAPE_TIMEOUT_SECONDS) as client:
        text = client.get("/metrics").raise_for_status().text
        while True:
            time.sleep(SETTLE_GAP_SECONDS)
            again = client.get("/metrics").raise_for_status().text
            if _engine_lines(again) == _engine_lines(text):
                break
            text = again
            if time.monotonic() - started > SETTLE_LIMIT_SECONDS:
                caveats.append(f"{NOT_SETTLED} within {SETTLE_LIMIT_SECONDS} s")
                break
    try:
        reading = read_page(parse_page(again), vllm_version, model)
    except UnusableInput as error:
        return Scrape(again, {}, [str(error)], time.monotonic() - started)
    return Scrape(again, reading.values, caveats + reading.caveats, time.monotonic() - started)


def _engine_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("vllm:")]


class PhaseFacts:
    """What a phase's record says of its requests, gathered as results come; quantiles stay exact.

    A finished request takes 32 bytes here; gaps between tokens are counted by their whole microseconds.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.finished = 0
        self.errors: Counter[str] = Counter()
        self.first_error: str | None = None
        self.output_tokens = 0
        self.ttfts = array("d")
        self.e2es = array("d")
        self.gaps_us: Counter[int] = Counter()
        self.due = array("d")
        self.due_last = 0.0
        self.ended_last = 0.0
        self._listed: dict[str, RequestFact | None] = {}
        self._max_tokens: dict[str, int] = {}

    def noting(self, requests: Iterable[RequestSpec]) -> Iterator[RequestSpec]:
        """The same requests; the first thousand are the ones to be listed in the record."""
        for request in requests:
            if len(self._listed) < LISTED_REQUESTS_MAX:
                self._listed[request.key] = None
                self._max_tokens[request.key] = request.max_tokens
            yield request

    def add(self, result: RequestResult) -> None:
        """Take one result."""
        self.sent += 1
        self.output_tokens += result.output_tokens
        self.due_last = max(self.due_last, result.scheduled_ns / 1e9)
        self.ended_last = max(self.ended_last, (result.last_token_ns or result.scheduled_ns) / 1e9)
        if result.error is None:
            self.finished += 1
            if (ttft := ttft_seconds(result)) is not None:
                self.ttfts.append(ttft)
                self.due.append(result.scheduled_ns / 1e9)
            if e2e := e2e_seconds(result):
                self.e2es.append(e2e)
            self.gaps_us.update(result.token_gaps_us)
        else:
            self.errors[result.error.error_class] += 1
            self.first_error = self.first_error or result.error.detail
        if result.key in self._listed:
            self._listed[result.key] = request_fact(result, self._max_tokens[result.key])

    def open_loop(self) -> OpenLoop | None:
        """How the requests fared over the time in which they were due; None without a first token."""
        if not self.due:
            return None
        first = min(self.due)
        middle = (first + self.due_last) / 2
        halves: tuple[list[float], list[float]] = ([], [])
        for due, ttft in zip(self.due, self.ttfts, strict=True):
            halves[due > middle].append(ttft)
        early, late = (statistics.fmean(half) if half else None for half in halves)
        return OpenLoop(self.due_last - first, self.ended_last - self.due_last, early, late)

    @property
    def listed(self) -> list[RequestFact]:
        """The first thousand requests, in the order in which they were given."""
        return [fact for fact in self._listed.values() if fact is not None]


def run_phase(
    phase: PhasePlan,
    launch: Launch,
    limits: Limits,
    folder: Path,
    on_result: Callable[[RequestResult], None],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    calibration_id: str | None = None,
    pinning: Pinning | None = None,
    spool_directory: Path | None = None,
) -> tuple[LoadOutcome, PhaseFacts]:
    """Send the phase's load; never raises for what the engine does: failures are results. `folder`: the plan's."""
    facts = PhaseFacts()

    def take(result: RequestResult) -> None:
        facts.add(result)
        on_result(result)

    outcome = run_load_blocking(
        load_spec(phase, launch, limits),
        facts.noting(phase_requests(phase, folder)),
        take,
        on_progress,
        calibration_id=calibration_id,
        pinning=pinning,
        spool_directory=spool_directory,
    )
    return outcome, facts


def phase_record(
    phase: PhasePlan, before: Scrape, after: Scrape, outcome: LoadOutcome, facts: PhaseFacts
) -> PhaseRecord:
    """The facts of a phase from its two scrapes and the client's results."""
    return PhaseRecord(
        name=phase.name,
        block=phase.block,
        started_monotonic_seconds=outcome.started_monotonic_ns / 1e9,
        seconds=outcome.seconds,
        scrape_seconds=after.seconds,
        concurrency=concurrency_of(phase),
        prompts_sha256=outcome.prompts_sha256,
        sent=facts.sent,
        finished=facts.finished,
        failed=facts.sent - facts.finished,
        errors=dict(facts.errors),
        output_tokens=facts.output_tokens,
        ttft_median_seconds=percentile(facts.ttfts, 0.5),
        ttft_p95_seconds=percentile(facts.ttfts, 0.95),
        inter_token_median_seconds=gap_percentile(facts.gaps_us, 0.5),
        inter_token_p95_seconds=gap_percentile(facts.gaps_us, 0.95),
        e2e_median_seconds=percentile(facts.e2es, 0.5),
        output_throughput_tokens_per_second=facts.output_tokens / outcome.seconds if outcome.seconds > 0 else None,
        before=before.values,
        after=after.values,
        metrics_caveats=after.caveats,
        card=outcome.card,
        requests=facts.listed,
        ttft_mean_seconds=statistics.fmean(facts.ttfts) if facts.ttfts else None,
        inter_token_mean_seconds=_gap_mean(facts.gaps_us),
        e2e_p95_seconds=percentile(facts.e2es, 0.95),
        arrivals=arrivals_text(phase),
        open_loop=facts.open_loop() if open_loop(phase) else None,
    )


def arrivals_text(phase: PhasePlan) -> str:
    """How the requests of a phase come, in words."""
    match phase.arrivals:
        case ConstantPlan(rate_per_second=rate):
            return f"constant, {rate:g} a second"
        case PoissonPlan(rate_per_second=rate):
            return f"Poisson, {rate:g} a second"
        case RecordedPlan(speed=speed):
            return "as recorded" if speed == 1 else f"as recorded, {speed:g} times as fast"
    return f"closed loop, {concurrency_of(phase)} in flight"


def ttft_seconds(result: RequestResult) -> float | None:
    """Time to first token, from the scheduled send to the arrival of the first token id, seconds."""
    return None if result.first_token_ns is None else (result.first_token_ns - result.scheduled_ns) / 1e9


def e2e_seconds(result: RequestResult) -> float | None:
    """From the scheduled send to the last token, seconds."""
    return None if result.last_token_ns is None else (result.last_token_ns - result.scheduled_ns) / 1e9


def percentile(values: Sequence[float], share: float) -> float | None:
    """The `share` quantile with linear interpolation (Hyndman-Fan type 7), None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def gap_percentile(counts: Counter[int], share: float) -> float | None:
    """`percentile` in seconds of values that are counted by their whole microseconds, None for no values."""
    total = counts.total()
    if not total:
        return None
    position = share * (total - 1)
    low = int(position)
    below = above = None
    passed = 0
    for gap_us in sorted(counts):
        passed += counts[gap_us]
        if below is None and passed > low:
            below = gap_us
        if passed > min(low + 1, total - 1):
            above = gap_us
            break
    assert below is not None and above is not None
    return (below + (above - below) * (position - low)) / 1e6


def _gap_mean(counts: Counter[int]) -> float | None:
    total = counts.total()
    return sum(gap_us * count for gap_us, count in counts.items()) / total / 1e6 if total else None


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
        dispatch_lag_seconds=None if result.sent_ns is None else (result.sent_ns - result.scheduled_ns) / 1e9,
    )


def write_scrapes(directory: Path, phase: str, before: Scrape, after: Scrape) -> None:
    """Write both pages as metrics/<phase>.{before,after}.prom; those of a second engine as <phase>.before.2.prom."""
    directory.mkdir(exist_ok=True)
    for moment, scrape in (("before", before), ("after", after)):
        write_atomically(directory / f"{phase}.{moment}.prom", scrape.text.encode())
        for number, text in enumerate(scrape.texts, start=2):
            write_atomically(directory / f"{phase}.{moment}.{number}.prom", text.encode())
