"""Faults that a test plants, each of which some gate or watch has to notice.

`STANDIN_FAULT` is a comma list of names, some with a number or text after a colon. `STANDIN_FAULT_ARM` limits
all of them to the arm with a connector (`offload`) or without one (`control`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FAULTS: dict[str, str] = {
    "no_load": "the tier stores, but never loads",
    "wrong_load_bytes": "every load is counted one GPU block too large",
    "corrupt_on_load": "the answer changes when KV was loaded from the tier",
    "same_answer": "answers do not depend on the prompt",
    "local_hits": "the GPU cache is infinite: nothing is ever evicted",
    "connector_in_control": "without a connector, kv_offload families appear all the same, with loads",
    "counter_reset": ":N counters restart and process_start_time jumps, once, after N requests (default 10)",
    "die_after": ":N the parent and EngineCore are killed by SIGKILL after N completions",
    "engine_dead_after": ":N /health 503 and completions 500 after N completions; EngineDeadError in the log",
    "deadlock_after": ":N after N completions nothing is scheduled any more; /health stays 200",
    "fail_start": "exits 1 with the error text of a /dev/shm that is too small",
    "slow_start": ":SECONDS the port opens that much later",
    "never_healthy": "the port never opens; the process stays",
    "routable_bind": "a second socket listens on 0.0.0.0, at a port of the kernel's choice",
    "wrong_model_name": "/v1/models, the metrics and the answers name another model",
    "wrong_version": ":X the version shown is X",
    "short_output": "every output is one token short (but never empty)",
    "extra_config": "scheduler_config in /server_info differs in long_prefill_token_threshold",
    "orphan_core": "EngineCore ignores SIGTERM and outlives its parent (for 300 s at most)",
    "ignore_sigterm": "the parent ignores SIGTERM",
    "abort_requests": ":N every Nth stream is cut after its first token (default 5)",
    "host_register_failed": "logs that the region could not be pinned",
    "reset_in_name": "/reset_prefix_cache answers success and empties nothing",
    "late_store_count": "store counters are published 100 ms late",
}


class UnknownFault(ValueError):
    """STANDIN_FAULT or STANDIN_FAULT_ARM names something that does not exist."""


@dataclass(frozen=True)
class Faults:
    """The planted faults that apply to this engine: name -> text after the colon ('' without one)."""

    planted: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        assert name in FAULTS, name
        return name in self.planted

    def text(self, name: str) -> str:
        return self.planted[name]

    def number(self, name: str, default: float) -> float:
        return float(self.planted[name] or default)

    def reached(self, name: str, count: int, default: int = 10) -> bool:
        """Whether the fault is planted and `count` has come to its number."""
        return name in self and count >= self.number(name, default)


def planted_faults(environment: Mapping[str, str], has_connector: bool) -> Faults:
    """Faults named in the environment that apply to this arm. Raises UnknownFault."""
    planted = {
        name.strip(): text.strip()
        for name, _, text in (item.partition(":") for item in environment.get("STANDIN_FAULT", "").split(","))
        if name.strip()
    }
    if unknown := sorted(set(planted) - set(FAULTS)):
        raise UnknownFault(f"STANDIN_FAULT names {', '.join(unknown)}; known: {', '.join(sorted(FAULTS))}")
    arm = environment.get("STANDIN_FAULT_ARM", "")
    if arm not in ("", "offload", "control"):
        raise UnknownFault(f"STANDIN_FAULT_ARM={arm}: use offload or control, or leave it unset")
    return Faults(planted if arm in ("", "offload" if has_connector else "control") else {})
