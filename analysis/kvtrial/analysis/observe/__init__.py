"""What a vLLM server that already runs, or a page, log or configuration of one, shows: facts, sureness, what to do.

Nothing is changed and no load is sent. `read` turns files into pages, `topics` turn pages into findings, `answer` puts
them in order. Everything but `live` and `command` is pure.
"""

from kvtrial.analysis.observe.answer import Answer, observe
from kvtrial.analysis.observe.finding import Finding

__all__ = ["Answer", "Finding", "observe"]
