"""A stand-in for vLLM's /v1/completions that stamps what it writes and misbehaves on demand. For client tests only.

It computes nothing: every token is made up, and every response says `Server: kvtrial-stamped-server (standin)`.
"""

from stamped_server.server import Script, Served, StampedServer

__all__ = ["Script", "Served", "StampedServer"]
