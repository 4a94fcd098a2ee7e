"""kvtrial: controlled trials of KV-cache settings on vLLM.

`kvtrial.record` holds what both sides share, `kvtrial.host` runs on the host under test, `kvtrial.analysis` turns
records into verdicts.
"""

__version__ = "0.1.0"
