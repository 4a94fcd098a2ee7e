"""What observe and judge say about one thing."""

from typing import Any, Literal

import msgspec

Severity = Literal["refuse", "warn", "info"]
"""refuse: the window or the input can't be used. warn: something is wrong. info: a fact."""

Confidence = Literal["seen", "inferred", "unknown"]
"""seen: the numbers say it. inferred: they fit nothing else that is known. unknown: not to be known from this input."""


class Finding(msgspec.Struct, frozen=True, rename={"class_": "class"}):
    """One thing found: its class, how much it matters, how sure it is, one or more sentences with numbers, what to do.

    `about`: the model or engine it concerns, where there are several.
    """

    class_: str
    severity: Severity
    reason: str
    numbers: dict[str, Any]
    do: str
    confidence: Confidence = "seen"
    about: str | None = None
