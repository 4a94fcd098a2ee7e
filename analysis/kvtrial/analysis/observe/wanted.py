"""Whether what is wanted is really something else.

A tier holds prefixes, FP8 makes each token smaller, Sleep Mode frees a GPU that nobody uses. The three are mixed up
often, and only one of them is what this project tries.
"""

from collections.abc import Iterator, Sequence

from kvtrial.analysis.observe.configuration import Configuration
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.window import Window

_PRESSED = {"preemption_continuous", "preemption_ongoing", "preemption_intermittent", "preemption_concentrated"}
_TIER_WITHOUT_USE = {"no_reuse_in_workload", "tier_smaller_than_gpu_kv", "tier_idle"}


def neighbours(classes: Sequence[str], window: Window, configuration: Configuration | None) -> Iterator[Finding]:
    """Findings on neighbours of a tier that would fit what is seen better."""
    cache = window.last.info.get("cache_config", {})
    dtype = cache.get("cache_dtype") or "auto"
    if _PRESSED.intersection(classes) and not dtype.startswith("fp8"):
        yield Finding(
            "fp8_kv_is_the_neighbour",
            "info",
            "If the aim is more requests at a time: a CPU tier does not give that, for what a running request needs "
            "stays "
            f"on the GPU. An FP8 KV cache does (cache_dtype is {dtype}: each token would take half the bytes), at a "
            f"price "
            "in precision that has to be measured.",
            {"cache_dtype": dtype},
            "Try it: -e protocol=preemption_ladder -e arms=fp8_kv. Answers are compared there too.",
            "inferred",
            window.about,
        )
    elif _TIER_WITHOUT_USE.intersection(classes) and "healthy_tier_serving" not in classes:
        yield Finding(
            "tier_is_no_saving_of_gpu_memory",
            "info",
            "If the aim was to save GPU memory: a CPU tier adds a place for prefixes and leaves the GPU's KV cache as "
            "large "
            "as it was. Smaller tokens are an FP8 KV cache; GPU memory given back while nobody asks is Sleep Mode.",
            {"cache_dtype": dtype},
            "Say which of the three is wanted before the tier is made larger.",
            "inferred",
            window.about,
        )
    sleeps = configuration is not None and configuration.parsed.options.get("enable-sleep-mode")
    if "idle" in classes and not window.since_start:
        held = " The server was started with --enable-sleep-mode." if sleeps else ""
        yield Finding(
            "sleep_mode_is_the_neighbour",
            "info",
            f"If the aim is to free the GPU while nobody asks: that is Sleep Mode, not a tier.{held}",
            {},
            "See vLLM's Sleep Mode; its endpoints are development endpoints and belong on loopback.",
            "inferred",
            window.about,
        )
