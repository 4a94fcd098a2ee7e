"""A store past memory: kvtrial history reads it within DuckDB's limit, with more groups than that limit holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy
import pyarrow
import pyarrow.parquet
import pytest
from kvtrial.analysis.history.model import Row
from kvtrial.analysis.history.store import files_of

HOSTS, NIGHTS, SERIES, PAIRS = 60, 100, 20, 2
LIMIT_MIB = 64
PEAK = """
import sys
from pathlib import Path
from kvtrial.analysis.history import reading, store
import duckdb
def peak():
    found = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(found) / 1024
store.DUCKDB_MEMORY_MIB = int(sys.argv[2])
if sys.argv[3] == "at once":
    store.DUCKDB_ROWS_A_MIB = 10**9
before = peak()
history = reading.read(Path(sys.argv[1]), engine="duckdb")
print(len(history.hosts), len(history.nights), history.series, len(history.pooled), peak() - before)
"""


def large_store(store: Path) -> int:
    """Write it, a file a night; how many groups (a series of a host on a night) it holds."""
    hosts = [f"h{number:02}" for number in range(HOSTS)]
    count = HOSTS * SERIES * PAIRS
    for number in range(NIGHTS):
        night = f"2026-{1 + number // 28:02}-{1 + number % 28:02}"
        texts = {
            "host": [host for host in hosts for _ in range(SERIES * PAIRS)],
            "settings": [json.dumps({"driver": "1", "host": host}) for host in hosts for _ in range(SERIES * PAIRS)],
            "phase": [f"phase {series}" for _ in hosts for series in range(SERIES) for _ in range(PAIRS)],
            "role": ["primary" if not series else "guard" for _ in hosts for series in range(SERIES)
                     for _ in range(PAIRS)],
        }  # fmt: skip
        told = {"campaign": night, "night": night, "protocol": "p", "kind": "effect", "word": "BETTER", "arm": "a",
                "against": "control", "scale": "ratio", "better": "lower", "metric": "ttft_median_seconds",
                "started_at_utc": "20261101T010000Z", "rule": '{"looks":7}'}  # fmt: skip
        columns = {}
        for field in msgspec.structs.fields(Row):
            if field.name == "value":
                columns[field.name] = pyarrow.array(numpy.random.default_rng(number).normal(0, 0.03, count))
            elif field.type in (int, float):
                columns[field.name] = pyarrow.array(numpy.full(count, 1, dtype=field.type))
            else:
                columns[field.name] = pyarrow.array(texts.get(field.name) or [told.get(field.name, "")] * count)
        folder = store / "protocol=p" / f"night={night}"
        folder.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"c-{night}.parquet", row_group_size=10_000)
    return HOSTS * NIGHTS * SERIES


def read_by(store: Path, how: str) -> subprocess.CompletedProcess[str]:
    """The history of the store, by DuckDB within LIMIT_MIB, in a process of its own."""
    command = [sys.executable, "-c", PEAK, str(store), str(LIMIT_MIB), how]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    assert large_store(folder) == 120_000 and len(files_of(folder)) == NIGHTS
    return folder


def test_a_history_of_more_groups_than_memory_holds_is_read_within_it(store):
    done = read_by(store, "some hosts at a time")
    assert done.returncode == 0, done.stderr
    hosts, nights, series, pooled, took = done.stdout.split()
    # Twenty series a host and those of the fleet; each host's newest trial and the fleet's.
    assert (int(hosts), int(nights), int(series), int(pooled)) == (HOSTS, NIGHTS, HOSTS * SERIES + SERIES, HOSTS + 1)
    # Beside what DuckDB may take: the points of all series, which are tested together.
    assert float(took) < 6 * LIMIT_MIB, f"{took} MiB"


def test_the_same_groups_all_at_once_do_not_fit(store):
    """What the test above would be without: a GROUP BY holds all its groups."""
    done = read_by(store, "at once")
    assert done.returncode != 0 and "Out of Memory" in done.stderr
