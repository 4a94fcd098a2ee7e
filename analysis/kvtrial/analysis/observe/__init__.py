"""What a vLLM server that already runs, or a page, log or configuration of one, shows: facts, sureness, what to do.

Nothing is changed and no load is sent. `pages`, `logs`, `configuration` and `client` read what was given; a module a
topic (`preemption`, `queue`, `tier`, `host`, ...) turns it into findings; `answer` puts them in order. Everything but
`live`, `command` and what reads a file is pure.
"""

from kvtrial.analysis.observe.answer import Answer, observe
from kvtrial.analysis.observe.finding import Finding

__all__ = ["Answer", "Finding", "observe"]
