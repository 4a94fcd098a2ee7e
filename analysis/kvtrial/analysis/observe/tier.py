"""What the CPU tier really does: serve, mirror the GPU's cache, be asked in vain, be too small, be slow."""

from collections.abc import Iterator
from typing import Any

import msgspec

from kvtrial.analysis.observe.capacity import Sizes, Told, sizes_of
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window
from kvtrial.analysis.observe.words import gigabytes_per_second, listed, percent, plural, signed_bytes, whole

GPU_ANSWERS_SHARE = 0.10
"""Share of prompt tokens found in the GPU's own cache from which that cache counts as what answers."""
PAGEABLE_BYTES_PER_SECOND = 6e9
"""Below it a copy over PCIe looks like pageable memory: pinned ones were seen at 21 to 45 GB/s."""
SERVES_SHARE = 0.01
"""Share of prompt tokens from which a tier that is not larger than the GPU's KV cache counts as serving."""
FEW_REQUESTS = 20
LEAST_BYTES_JUDGED = 100e6
LEAST_OPERATION_BYTES = 1e6


class Traffic(msgspec.Struct, frozen=True):
    """The tier's traffic in a window, bytes and tokens; None: not exported."""

    load: float | None
    store: float | None
    local_hits: float | None
    external_hits: float | None
    external_queries: float | None
    prompt: float | None
    bandwidth: float | None
    operation_bytes: float | None

    @property
    def connector(self) -> bool:
        """Whether the page shows a connector's series."""
        return self.load is not None or self.store is not None

    def needed(self) -> dict[str, float | None]:
        """What must be known before a tier without loads can be explained."""
        return {"load bytes": self.load, "GPU prefix hits": self.local_hits, "prompt tokens": self.prompt}

    def numbers(self, window: Window) -> dict[str, Any]:
        """The same under the names of the reports."""
        return {
            "store": self.store,
            "load": self.load,
            "local_hits": self.local_hits,
            "external_hits": self.external_hits,
            "external_queries": self.external_queries,
            "prompt": self.prompt,
            "bandwidth_gb_s": None if self.bandwidth is None else round(self.bandwidth / 1e9, 1),
            "load_bytes": window.whole.per_engine.get("load_bytes", {}),
            "store_bytes": window.whole.per_engine.get("store_bytes", {}),
        }


def traffic_of(window: Window) -> Traffic:
    """The tier's traffic within a window."""
    load, took, jobs = window.rise("load_bytes"), window.rise("load_seconds"), window.rise("load_operations")
    local = window.rise("prompt_tokens_local_hit")
    return Traffic(
        load,
        window.rise("store_bytes"),
        local if local is not None else window.rise("prefix_cache_hits_tokens"),
        window.rise("external_prefix_cache_hits_tokens"),
        window.rise("external_prefix_cache_queries_tokens"),
        window.rise("prompt_tokens"),
        load / took if load and took else None,
        load / jobs if load and jobs else None,
    )


def tier(window: Window, told: Told | None = None) -> Iterator[Finding]:
    """Findings on the CPU tier; none where the page shows no connector."""
    flow = traffic_of(window)
    if not flow.connector:
        return
    each = flow.load / flow.external_hits if flow.load and flow.external_hits else None
    sizes = sizes_of(window.last, told, each)
    if flow.load:
        if _slow(window, flow):
            yield _pageable(window, flow)
        if sizes.tier_not_larger and (flow.external_hits or 0) < SERVES_SHARE * (flow.prompt or 0):
            yield _mirror(window, flow, sizes)
        yield _serving(window, flow, sizes)
        yield from _reset_kept(window, flow)
        return
    unknown = [name for name, value in flow.needed().items() if value is None]
    if unknown or flow.external_hits:
        yield _untold(window, flow, unknown)
        yield from _failed_stores(window)
        return
    if sizes.tier_not_larger and (flow.store or flow.external_queries):
        yield _mirror(window, flow, sizes)
    hits_share = flow.local_hits / flow.prompt if flow.local_hits and flow.prompt else 0.0
    if hits_share >= GPU_ANSWERS_SHARE:
        if not sizes.tier_not_larger:
            yield _gpu_answered(window, flow, hits_share)
    elif sizes.tier_not_larger:
        # What comes back to such a tier can't be told from what does not.
        pass
    elif flow.store or flow.external_queries:
        yield _no_reuse(window, flow, sizes, hits_share)
    elif flow.prompt:
        yield Finding(
            "tier_idle",
            "info",
            f"The connector is there and moved nothing {window.during}: store 0 B, load 0 B, {whole(flow.prompt)} "
            f"prompt "
            "tokens. Prompts shorter than one chunk are never stored.",
            flow.numbers(window),
            "Compare prompt lengths with block_size (or blocks_per_chunk x block) of the connector.",
            about=window.about,
        )
    yield from _failed_stores(window)


def _untold(window: Window, flow: Traffic, unknown: list[str]) -> Finding:
    """Loads that can't be told: a series is unknown, or the tier found tokens and no load of them is counted."""
    found = (
        f"the tier found {whole(flow.external_hits)} tokens that the GPU's cache had not, so it was asked for what it "
        "has, and whether they were loaded or computed again is not known"
        if flow.external_hits
        else "whether it serves, and why not, is not known"
    )
    why = (
        f"{listed(unknown)} {'is' if len(unknown) == 1 and unknown[0][-1] != 's' else 'are'} missing or unreadable on "
        "these pages, which is not zero"
        if unknown
        else f"load 0 B {window.during}: a load is counted some steps after its hit, by an idle engine with its next "
        "step, and a load that fails leaves its hit counted"
    )
    return Finding(
        "tier_loads_unknown",
        "warn",
        f"Store {_bytes(flow.store)}, load {_bytes(flow.load)} {window.during}; {found}. {why[0].upper()}{why[1:]}.",
        flow.numbers(window) | {"unknown": unknown},
        "Fetch the server's own pages, whole, and a last one when all requests have ended; look for failed loads in "
        "the log (--log).",
        "unknown",
        window.about,
    )


def _bytes(value: float | None) -> str:
    return "unknown" if value is None else signed_bytes(value)


def _count(value: float | None) -> str:
    return "unknown" if value is None else whole(value)


def _slow(window: Window, flow: Traffic) -> bool:
    large = (flow.load or 0) >= LEAST_BYTES_JUDGED and (flow.operation_bytes or 0) >= LEAST_OPERATION_BYTES
    slow = flow.bandwidth is not None and flow.bandwidth < PAGEABLE_BYTES_PER_SECOND
    return window.backend != "cpu" and large and slow


def _pageable(window: Window, flow: Traffic) -> Finding:
    return Finding(
        "tier_not_pinned",
        "warn",
        f"Loads run at {gigabytes_per_second(flow.bandwidth or 0)} ({signed_bytes(flow.load or 0)} in "
        f"{(flow.load or 0) / (flow.bandwidth or 1):.2f} s of transfer time), which is what pageable memory gives; "
        "pinned memory was seen at 21 GB/s and more. The metrics don't say whether it is pinned, the log of the start "
        "does (cudaHostRegister failed).",
        {**flow.numbers(window), "pageable_below_gb_s": PAGEABLE_BYTES_PER_SECOND / 1e9},
        "Look for 'host_register failed' in the log of the start (--log). Then raise LimitMEMLOCK= of the unit "
        "(--ulimit "
        "memlock=-1 of the container) or take a tier below 512 GiB; a result measured with a pageable tier is invalid.",
        "inferred",
        window.about,
    )


def _serving(window: Window, flow: Traffic, sizes: Sizes) -> Finding:
    load, hits = flow.load or 0.0, flow.external_hits or 0.0
    share = f", {percent(hits / flow.prompt)} of {whole(flow.prompt)} prompt tokens" if flow.prompt and hits else ""
    rate = f" at {gigabytes_per_second(flow.bandwidth)}" if flow.bandwidth else ""
    gauges = window.gauge("offload_pinned_share")
    if gauges and max(gauges) < 0.01:
        gauge = (
            f" The kv_offload_cpu_cache usage gauges read {max(gauges):g}: they show space pinned by running "
            f"transfers, "
            "not what is resident, so 0 between transfers is normal."
        )
    else:
        gauge = ""
    preempted = window.rise("preemptions") or 0
    if hits:
        proof = f"external hits +{whole(hits)} tokens{share}"
    elif preempted:
        proof = (
            f"external hits +0: lookups of preempted requests ({whole(preempted)} preemptions) are counted in no hit "
            "series, their loads are"
        )
    else:
        proof = "external hits +0, which the loads contradict: a load may have been counted a step later"
    local = f" The GPU's own cache gave {whole(flow.local_hits)} tokens." if flow.local_hits else ""
    each = f" A token takes {load / hits:,.0f} B by these numbers; equality is not required." if hits else ""
    small = f" It serves although it is not larger: {sizes.described()}." if sizes.tier_not_larger and hits else ""
    return Finding(
        "healthy_tier_serving",
        "info",
        f"The tier serves: load {signed_bytes(load)}{rate}, {proof}; store {_bytes(flow.store)} "
        f"{window.during}.{gauge}{local}{each}{small} Whether a load is sooner than computing again, these counters "
        f"can't "
        "tell.",
        flow.numbers(window) | {"share_of_prompt": hits / flow.prompt if flow.prompt else None},
        "Nothing to repair. Never use these gauges as a fill level." if gauges else "Nothing to repair.",
        about=window.about,
    )


def _gpu_answered(window: Window, flow: Traffic, share: float) -> Finding:
    holds = window.last.info.get("cache_config", {}).get("kv_cache_size_tokens", "")
    cache = f"The GPU's cache ({int(holds):,} tokens)" if holds.isdigit() else "The GPU's cache"
    queries = (
        f" (the connector was asked for {whole(flow.external_queries)} tokens)"
        if flow.external_queries is not None
        else ""
    )
    return Finding(
        "gpu_cache_answered",
        "info",
        f"Store {_bytes(flow.store)}, load 0 B {window.during}. GPU prefix hits "
        f"{whole(flow.local_hits or 0)} "
        f"of {whole(flow.prompt or 0)} prompt tokens ({percent(share)}), external hits "
        f"{_count(flow.external_hits)}{queries}. {cache} still holds what comes back, so the tier is never asked "
        f"for "
        "anything that it alone has. No load is no fault of the connector here.",
        flow.numbers(window),
        "To test the tier: a smaller GPU KV cache in both arms (--kv-cache-memory-bytes), or a set of prefixes larger "
        "than the GPU's KV cache and smaller than the tier, or POST /reset_prefix_cache without reset_external between "
        "filling and measuring. If this is the load you have, the tier is not needed for it.",
        about=window.about,
    )


def _mirror(window: Window, flow: Traffic, sizes: Sizes) -> Finding:
    loaded = f"load {signed_bytes(flow.load or 0)}, external hits {_count(flow.external_hits)}"
    return Finding(
        "tier_smaller_than_gpu_kv",
        "warn",
        f"The CPU tier is not larger than the GPU's KV cache: {sizes.described()} (by {sizes.source}). Stores are "
        f"immediate and mirror the GPU, so what the GPU has evicted the tier has evicted too: store "
        f"{_bytes(flow.store)}, {loaded} {window.during}. That is the size, not the connector.",
        flow.numbers(window)
        | {
            "tier_bytes": sizes.tier_bytes,
            "tier_tokens": sizes.tier_tokens,
            "tier_tokens_at_most": sizes.tier_tokens_at_most,
            "gpu_kv_bytes": sizes.gpu_bytes,
            "gpu_kv_tokens": sizes.gpu_tokens,
        },
        "Make the tier clearly larger than the GPU's KV cache (2x or more) where RAM allows, or take it out; for a "
        "trial, shrink --kv-cache-memory-bytes in both arms.",
        "inferred" if sizes.tokens_inferred else "seen",
        window.about,
    )


def _no_reuse(window: Window, flow: Traffic, sizes: Sizes, share: float) -> Finding:
    off = window.last.info.get("cache_config", {}).get("enable_prefix_caching") == "False"
    asked = (
        f"asked for {whole(flow.external_queries)} tokens, found {_count(flow.external_hits)}"
        if flow.external_queries is not None
        else "what it was asked for is not exported"
    )
    larger = sizes.tier_not_larger is False
    why = (
        "prefix caching is off (enable_prefix_caching=False), so no prefix is ever looked up"
        if off
        else "no prompt begins like an earlier one: another beginning (a date, a user's name or a random id in front), "
        "another cache_salt, or another model name by request"
    )
    tier = (
        f" It is not its size: {sizes.described()}."
        if larger
        else " How large the tier is these pages don't say; a set that comes back only after the tier has evicted it "
        "looks the same."
    )
    ended = window.finished
    few = (
        f" Only {plural(ended, 'request')} ended in the window, so a longer one may show some."
        if ended is not None and ended < FEW_REQUESTS
        else ""
    )
    return Finding(
        "no_reuse_in_workload",
        "info",
        f"Store {_bytes(flow.store)}, load 0 B {window.during}; GPU prefix hits "
        f"{whole(flow.local_hits or 0)} of {whole(flow.prompt or 0)} prompt tokens ({percent(share)}), the tier was "
        f"{asked}. Nothing in this load comes back: {why}.{tier}{few} Storing costs copies and gives nothing here.",
        flow.numbers(window)
        | {"tier_tokens": sizes.tier_tokens, "gpu_kv_tokens": sizes.gpu_tokens, "tier_bytes": sizes.tier_bytes},
        "Compare the first tokens and the cache_salt of two requests that should share a beginning. If none should, "
        "take "
        "the connector out.",
        "seen" if larger or off else "inferred",
        window.about,
    )


def _reset_kept(window: Window, flow: Traffic) -> Iterator[Finding]:
    resets = window.rise("http_reset_prefix_cache_calls")
    if resets and flow.external_hits and not window.since_start:
        yield Finding(
            "reset_kept_the_tier",
            "warn",
            f"/reset_prefix_cache was called {plural(resets, 'time')} {window.during} and the tier still gave "
            f"{whole(flow.external_hits)} tokens: without reset_external=true it clears the GPU's cache alone "
            f"(#57727), and "
            "OffloadingConnector heeds that only from 0.22. What was measured as cold was warm.",
            {"reset_calls": resets, "external_hits": flow.external_hits},
            "Use a new cache_salt for what must be cold, or reset_external=true (0.22 and newer) and read success in "
            "the "
            "answer's body (0.26 and newer).",
            "inferred",
            window.about,
        )


def _failed_stores(window: Window) -> Iterator[Finding]:
    failed = window.rise("offload_allocation_failures")
    skipped = window.rise("offload_stores_skipped")
    if failed:
        yield Finding(
            "tier_full",
            "warn",
            f"{plural(failed, 'store')} found no free chunk in the tier {window.during}: it is full of what transfers "
            "hold, so less was stored than the prompts hold.",
            {"allocation_failures": failed},
            "Take a larger tier, or fewer requests at a time.",
            about=window.about,
        )
    if skipped:
        yield Finding(
            "stores_skipped",
            "info",
            f"store_threshold left out {plural(skipped, 'store')} {window.during}.",
            {"stores_skipped": skipped},
            "Nothing, if the threshold is meant.",
            about=window.about,
        )
