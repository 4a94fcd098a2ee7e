"""What a result set that others made is worth: the same gates and statistics as for this project's own records.

`results` and `peers` read files, `validity` decides blind to the outcome which pairs count, `worth` what they say.
"""

from kvtrial.analysis.judge.worth import Judgement, judge

__all__ = ["Judgement", "judge"]
