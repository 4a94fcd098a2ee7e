"""Gates: checks of validity, decided from records alone and blind to the outcome.

A protocol lists its gates by name with parameters; each is a function from facts to passed (or not, or undecidable)
and a sentence with the numbers. Importing this package registers all of them.
"""

from kvtrial.analysis.gates import answers, conditions, counts, ladder, launch, preemptions, sizing, treatment
from kvtrial.analysis.gates.context import GATES, GateContext, run_gates, validate_gates

__all__ = [
    "GATES",
    "GateContext",
    "answers",
    "conditions",
    "counts",
    "ladder",
    "launch",
    "preemptions",
    "run_gates",
    "sizing",
    "treatment",
    "validate_gates",
]
