"""Synthetic records of `offload_mix`: the honest records' warm-up, return and miss, then the blocks of the sweep.

Made, not measured. In the offload arm the mean TTFT of a mix is the control's plus cost × (1 − share) − gain × share.
"""

from collections.abc import Callable, Sequence
from functools import cache

from build import BYTES_PER_TOKEN, LOADED_TOKENS, PROMPT_TOKENS, PROTOCOLS, VERSION, _card, _sha, honest_records
from kvtrial.analysis.protocols import load_protocol, resolve, with_sizes
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import OpenLoop, PhaseRecord, RequestFact, RunRecord
from msgspec.structs import replace

SHARES = (0, 25, 50, 75, 100)
REQUESTS = 16
PRESSURE = 8
SPAN_SECONDS = 16.0
Ttft = Callable[[int, str, int], float]
"""(pair, arm, percent) → mean TTFT of the mix, seconds."""


@cache
def mix_protocol(name: str = "offload_mix") -> Protocol:
    """The shipped protocol, its sizes those of these records."""
    return resolve(with_sizes(load_protocol(name, PROTOCOLS), {"prompt_tokens": PROMPT_TOKENS}), VERSION)


def line(cost: float, gain: float, jitter: float = 0.0) -> Ttft:
    """Mean TTFTs that lie on a line; `jitter` seconds of noise, drawn from pair and share."""

    def ttft(pair: int, arm: str, percent: int) -> float:
        control = 0.30 + 0.002 * pair
        if arm == "control":
            return control
        share = percent / 100
        noise = jitter * (int(_sha("noise", pair, percent)[:6], 16) / 0xFFFFFF - 0.5) * 2
        return control + cost * (1 - share) - gain * share + noise

    return ttft


def mix_records(ttft: Ttft | None = None, pairs: int = 6) -> list[RunRecord]:
    """Two runs a pair, every gate of `offload_mix` satisfied. By default a miss costs 20 ms, a return gains 180 ms."""
    return [_with_mixes(run, ttft or line(0.02, 0.18)) for run in honest_records(pairs)]


def with_open_loop(record: RunRecord, phase: str, first: float, second: float) -> RunRecord:
    """The record with other mean TTFTs in the halves of one phase."""
    loop = OpenLoop(SPAN_SECONDS, 0.6, first, second)
    return replace(record, phases=[replace(p, open_loop=loop) if p.name == phase else p for p in record.phases])


def _with_mixes(run: RunRecord, ttft: Ttft) -> RunRecord:
    phases = [phase for phase in run.phases if phase.block in ("warmup", "return", "miss")]
    phases = sorted(phases, key=lambda phase: phase.started_monotonic_seconds)
    counters = dict(phases[-1].after)
    clock = phases[-1].started_monotonic_seconds + 10
    for percent in SHARES:
        block = f"mix_{percent:02d}"
        targets = [_request("target", run, percent, index, 1) for index in range(REQUESTS)]
        pressure = [_request("pressure", run, percent, index, 1) for index in range(PRESSURE)]
        mixed = _mixed(run, percent)
        for name, requests, returning in (
            (f"populate_{percent:02d}", targets, 0),
            (f"pressure_{percent:02d}", pressure, 0),
            (block, mixed, percent * REQUESTS // 100),
        ):
            mean = ttft(run.pair, run.arm, percent)
            phase = _phase(name, block, clock, requests, returning, run.arm, counters, mean)
            phases.append(phase)
            counters = dict(phase.after)
            clock += 20
    return replace(run, protocol="offload_mix", phases=phases)


def _mixed(run: RunRecord, percent: int) -> list[RequestFact]:
    """Returning prompts in their order, evenly among new ones."""
    hits, returned, requests = percent * REQUESTS // 100, 0, []
    for number in range(REQUESTS):
        if (number + 1) * hits // REQUESTS > number * hits // REQUESTS:
            requests.append(_request("target", run, percent, returned, 16))
            returned += 1
        else:
            requests.append(_request("fresh", run, percent, number - returned, 16))
    return requests


def _request(kind: str, run: RunRecord, percent: int, index: int, max_tokens: int) -> RequestFact:
    sha = _sha("mix", run.host, run.pair, kind, percent, index)
    return RequestFact(
        key=f"{kind}_{percent:02d}/{index}", prompt_sha256=sha, prompt_tokens=PROMPT_TOKENS, max_tokens=max_tokens,
        ttft_seconds=0.2, e2e_seconds=0.4, longest_gap_seconds=0.016, output_tokens=max_tokens, cached_tokens=None,
        answer_sha256=_sha("answer", sha, max_tokens), finish_reason="length", error_class=None,
    )  # fmt: skip


def _phase(
    name: str,
    block: str,
    clock: float,
    requests: Sequence[RequestFact],
    returning: int,
    arm: str,
    before: dict[str, float | None],
    mean: float,
) -> PhaseRecord:
    is_mix = name == block
    sent = len(requests)
    loaded = returning * LOADED_TOKENS if arm == "offload" else 0
    outputs = sum(request.output_tokens for request in requests)
    rises: dict[str, float] = {
        "prompt_tokens": PROMPT_TOKENS * sent,
        "prompt_tokens_computed": PROMPT_TOKENS * sent - loaded,
        "prompt_tokens_external": loaded,
        "requests_finished_length": sent,
        "generation_tokens": outputs,
    }
    if arm == "offload":
        rises |= {
            "external_prefix_cache_hits_tokens": loaded,
            "external_prefix_cache_queries_tokens": PROMPT_TOKENS * sent,
            "load_bytes": loaded * BYTES_PER_TOKEN,
            "store_bytes": (sent - returning) * LOADED_TOKENS * BYTES_PER_TOKEN,
        }
    return PhaseRecord(
        name=name,
        block=block,
        started_monotonic_seconds=clock,
        seconds=SPAN_SECONDS,
        scrape_seconds=0.05,
        concurrency=None if is_mix else 1,
        prompts_sha256=_sha(*(request.prompt_sha256 for request in requests)),
        sent=sent,
        finished=sent,
        failed=0,
        errors={},
        output_tokens=outputs,
        ttft_median_seconds=mean * 0.9,
        ttft_p95_seconds=mean * 2,
        inter_token_median_seconds=0.016,
        inter_token_p95_seconds=0.03,
        e2e_median_seconds=mean + 0.3,
        output_throughput_tokens_per_second=outputs / SPAN_SECONDS,
        before=before,
        after=before | {role: (before.get(role) or 0.0) + rise for role, rise in rises.items()},
        metrics_caveats=[],
        card=_card(SPAN_SECONDS),
        requests=list(requests),
        ttft_mean_seconds=mean,
        arrivals="poisson, 1 per second" if is_mix else None,
        open_loop=OpenLoop(SPAN_SECONDS, 0.6, mean, mean * 1.05) if is_mix else None,
    )
