"""A planted fault for the quick check: kvtrial's client, made slow by JSON on the hot path, as many benchmarks have it.

KVTRIAL_BENCH_CLIENT="python tests/bench/slow_client.py" make bench-client QUICK=1     has to fail
"""

import json
import sys
from collections.abc import Generator

from kvtrial.host.load import client
from kvtrial.host.load import connection as planted

_EVENT = json.dumps({"choices": [{"index": 0, "text": " x", "token_ids": [1], "logprobs": None}], "model": "m" * 150})
_honest = planted.receiving


def _slow(connection: planted.Connection, response: planted.Response) -> Generator[None, bytes, None]:
    honest = _honest(connection, response)
    next(honest)
    while True:
        data = yield
        for _ in range(100):
            json.loads(_EVENT)
        honest.send(data)


planted.receiving = _slow

if __name__ == "__main__":
    sys.exit(client.main(sys.argv[1:]))
