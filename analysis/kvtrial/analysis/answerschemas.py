"""JSON Schemas of what the commands print with --json, beside those of what is written (`kvtrial.record.schemas`)."""

from typing import Any

from kvtrial.analysis.check import CheckAnswer
from kvtrial.analysis.judge import Judgement
from kvtrial.analysis.observe import Answer
from kvtrial.record.schemas import SCHEMAS, json_schema

ANSWERS: dict[str, type] = {"check_answer": CheckAnswer, "observe_answer": Answer, "judge_answer": Judgement}
NAMES = sorted([*SCHEMAS, *ANSWERS])


def schema_named(name: str) -> dict[str, Any]:
    """The JSON Schema of one of NAMES."""
    return json_schema(name, ANSWERS.get(name))
