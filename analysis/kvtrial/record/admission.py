"""How vLLM's scheduler lets requests in, of what a prediction of preemption rests on; by version, as data."""

from msgspec import Struct

from kvtrial.record.serveoptions import Span
from kvtrial.record.versions import data


class AdmissionTable(Struct, frozen=True, forbid_unknown_fields=True):
    """`data/admission.yml`. `unpredicted`: option without its dashes → what it does."""

    whole_prompts: Span
    sequences_at_least: int
    unpredicted: dict[str, str]


def admission() -> AdmissionTable:
    """What is known of it."""
    return data("admission", AdmissionTable)
