"""A planted fault for the quick check: kvtrial's client, made slow by JSON on the hot path, as many benchmarks have it.

KVTRIAL_BENCH_CLIENT="python tests/bench/slow_client.py" make bench-client QUICK=1     has to fail
"""

import json
import sys

from kvtrial.host.load import client
from kvtrial.host.load import connection as planted

_EVENT = json.dumps({"choices": [{"index": 0, "text": " x", "token_ids": [1], "logprobs": None}], "model": "m" * 150})
_honest = planted.Connection.data_received


def _slow(self: planted.Connection, data: bytes) -> None:
    for _ in range(100):
        json.loads(_EVENT)
    _honest(self, data)


planted.Connection.data_received = _slow  # type: ignore[method-assign]

if __name__ == "__main__":
    sys.exit(client.main(sys.argv[1:]))
