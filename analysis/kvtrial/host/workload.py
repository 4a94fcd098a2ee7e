"""Requests from a plan: the same plan gives the same token ids, on every host."""

import hashlib
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvtrial.record.load import LoadSpec, RequestSpec
from kvtrial.record.plan import HostPlan, Launch, Limits, MixPlan, PhasePlan, PromptPlan, files_of_traces
from kvtrial.record.trace import check_trace
from kvtrial.record.workload import RequestShape, SetPrompt, Source, concurrency_of, planned_requests

SUFFIX_SEED = "kvtrial suffix"


def make_prompts(plan: PromptPlan) -> list[list[int]]:
    """`plan.count` lists of `plan.tokens` token ids; the last `suffix_tokens` are equal in all prompts of all sets."""
    return [make_prompt(plan, index) for index in range(plan.count)]


def make_prompt(plan: PromptPlan, index: int) -> list[int]:
    """Prompt `index` of the set."""

    def ids(source: random.Random, count: int) -> list[int]:
        return [source.randint(plan.low_id, plan.high_id) for _ in range(count)]

    body = ids(random.Random(f"{plan.seed}/{index}"), plan.tokens - plan.suffix_tokens)
    return body + ids(random.Random(SUFFIX_SEED), plan.suffix_tokens)


def stream_ids(seed: str, count: int, low_id: int, high_id: int) -> list[int]:
    """The first `count` token ids of an endless stream that `seed` names: fewer are always the beginning of more."""
    span = high_id - low_id + 1
    words = struct.unpack(f"<{count}I", hashlib.shake_128(seed.encode()).digest(4 * count))
    return [low_id + word % span for word in words]


def phase_requests(phase: PhasePlan, folder: Path) -> Iterator[RequestSpec]:
    """The requests of a phase in their order, made one at a time. `folder` is the plan's.

    Raises UnusableInput, at the end at the latest, where the file of a trace is not the one that was planned with: read
    all before sending any.
    """
    for shape, source in planned_requests(phase, folder):
        ids, text = _prompt(phase, shape, source)
        yield RequestSpec(
            key=shape.key,
            prompt_token_ids=ids,
            prompt_text=text,
            max_tokens=shape.max_tokens,
            cache_salt=shape.salt,
            kv_transfer_params=phase.kv_transfer_params,
            scheduled_seconds=shape.scheduled_seconds,
            after=shape.after,
            pause_seconds=shape.pause_seconds,
            **_ending(phase, shape),
        )


def _ending(phase: PhasePlan, shape: RequestShape) -> dict[str, Any]:
    """How an answer is made to end before its limit, where the phase asks for that: at the lowest id of the prompts."""
    made = phase.prompts or phase.workload
    if not 0 < phase.stop_after < shape.max_tokens or made is None or isinstance(made, MixPlan):
        return {}
    return {"stop_after": phase.stop_after, "stop_token_id": made.low_id}


def _prompt(phase: PhasePlan, shape: RequestShape, source: Source) -> tuple[list[int] | None, str | None]:
    """A request's prompt: token ids, or text."""
    if isinstance(source, SetPrompt):
        return make_prompt(source.prompts, source.index), None
    if source is not None and source.prompt is not None:
        return None, source.prompt
    if source is not None and source.prompt_token_ids is not None:
        return source.prompt_token_ids, None
    made = phase.workload
    assert made is not None and not isinstance(made, MixPlan)
    shared = stream_ids(shape.shared, shape.shared_tokens, made.low_id, made.high_id)
    return shared + stream_ids(shape.identity, shape.prompt_tokens - len(shared), made.low_id, made.high_id), None


def check_traces(plan: HostPlan, folder: Path) -> None:
    """Raise UnusableInput unless every trace that the plan names lies in `folder` as it was planned with."""
    for file, sha256 in files_of_traces(plan).items():
        check_trace(folder / file, sha256)


def load_spec(phase: PhasePlan, launch: Launch, limits: Limits) -> LoadSpec:
    """The client's specification of a phase: against the arm's engine, closed loop or open."""
    return LoadSpec(
        base_url=f"http://127.0.0.1:{launch.port}",
        also_urls=[f"http://127.0.0.1:{engine.port}" for engine in launch.also],
        model=launch.served_model_name,
        concurrency=concurrency_of(phase),
        idle_timeout_seconds=limits.idle_timeout_seconds,
        request_timeout_seconds=limits.request_timeout_seconds,
        deadlock_seconds=limits.deadlock_seconds,
    )
