"""Which single experiment of this project would settle what is open, as the command to type."""

from collections.abc import Sequence

import msgspec

_RUN = ".venv/bin/ansible-playbook experiment.yml -i inventories/<fleet>"
_PLACE = "On a host like this one that serves nobody (kvtrial_host_may_be_disturbed: true)."


class Experiment(msgspec.Struct, frozen=True):
    """The open question and the command that settles it."""

    question: str
    command: str
    where: str = _PLACE


_BY_CLASS: dict[str, tuple[str, str]] = {
    "preemption_continuous": (
        "At which concurrency does it begin, and which single change takes it away?",
        f"{_RUN} -e protocol=preemption_ladder",
    ),
    "preemption_ongoing": ("At which concurrency does it begin?", f"{_RUN} -e protocol=preemption_ladder"),
    "preemption_intermittent": ("At which concurrency does it begin?", f"{_RUN} -e protocol=preemption_ladder"),
    "preemption_concentrated": (
        "Do shorter inputs or outputs take it away?",
        f"{_RUN} -e protocol=preemption_ladder -e arms=shorter_inputs,less_reserve",
    ),
    "not_preemption": (
        "Do more seats move this queue into preemptions?",
        f"{_RUN} -e protocol=preemption_ladder",
    ),
    "tier_smaller_than_gpu_kv": ("Which RAM budget is enough?", f"{_RUN} -e protocol=tier_size"),
    "gpu_cache_answered": (
        "Is an evicted prefix back sooner from the tier than computed again?",
        f"{_RUN} -e protocol=offload_return",
    ),
    "no_reuse_in_workload": (
        "How much of your own requests comes back at all?",
        f"{_RUN} -e protocol=offload_mix -e kvtrial_trace=<your requests>.jsonl",
    ),
    "deferred_behind_load": (
        "Is the tier worth its waiting for your mix?",
        f"{_RUN} -e protocol=offload_mix -e kvtrial_trace=<your requests>.jsonl",
    ),
    "version_hazard_preemption_cascade": (
        "Does the connector preempt without the defect?",
        f"{_RUN} -e protocol=preemption_ladder",
    ),
}


def experiment_for(classes: Sequence[str], share_of_prompt: float | None = None) -> Experiment | None:
    """The experiment for the first class that leaves a question; None where none does."""
    for name in classes:
        if name == "healthy_tier_serving":
            if share_of_prompt:
                percent = max(1, min(100, round(100 * share_of_prompt)))
                return Experiment(
                    f"Does it pay at the share seen here ({percent} % of prompt tokens from the tier)?",
                    f"{_RUN} -e protocol=offload_mix -e kvtrial_hit_share_percent={percent}",
                )
            return Experiment(
                "Is a load sooner than computing again?",
                f"{_RUN} -e protocol=offload_return",
            )
        if name in _BY_CLASS:
            return Experiment(*_BY_CLASS[name])
    return None
