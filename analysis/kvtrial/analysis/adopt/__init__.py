"""Acting on a verdict: what a fleet is to do with what a campaign tried, and the texts that say so.

`decision` is pure: verdict, what was tried and the fleet in, what to do out. `texts` reads a campaign's folder and
makes the group_vars and the production unit of it; `adopt` is its entry, for the module `kvtrial.vllm.adoption`.
"""

from kvtrial.analysis.adopt.decision import Decision, FleetHost, Production, Refusal, Tried, Wish, decide
from kvtrial.analysis.adopt.texts import adopt

__all__ = ["Decision", "FleetHost", "Production", "Refusal", "Tried", "Wish", "adopt", "decide"]
