"""A store past memory: DuckDB reads it within its limit, where pandas takes many times as much."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy
import pyarrow
import pyarrow.parquet
from kvtrial.analysis.history.model import Row
from kvtrial.analysis.history.store import files_of

HOSTS, NIGHTS, SERIES, PAIRS = 20, 60, 20, 6
SETTINGS_BYTES = 3000
LIMIT_MIB = 64
PEAK = """
import sys
from pathlib import Path
from kvtrial.analysis.history import store
def peak():
    found = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(found) / 1024
if sys.argv[2] == "duckdb":
    import duckdb
store.DUCKDB_MEMORY = sys.argv[3]
before = peak()
frame, engine = store.nights_of(store.files_of(Path(sys.argv[1])), sys.argv[2])
print(len(frame), peak() - before, len(set(frame["settings"])))
"""


def large_store(store: Path) -> float:
    """Write it, a file a host; MiB of its settings as they would lie in memory."""
    count = NIGHTS * SERIES * PAIRS
    for number in range(HOSTS):
        host = f"h{number:02}"
        nights = [f"2026-{1 + night // 28:02}-{1 + night % 28:02}" for night in range(NIGHTS)]
        filler = "x" * SETTINGS_BYTES
        settings = [json.dumps({"driver": str(night), "host": host, "filler": filler}) for night in range(NIGHTS)]
        texts = {
            "campaign": [f"c{night}" for night in nights for _ in range(SERIES * PAIRS)],
            "night": [night for night in nights for _ in range(SERIES * PAIRS)],
            "settings": [text for text in settings for _ in range(SERIES * PAIRS)],
            "metric": [f"m{series}" for _ in nights for series in range(SERIES) for _ in range(PAIRS)],
        }
        told = {"host": host, "protocol": "p", "kind": "control", "word": "BETTER", "role": "primary",
                "scale": "ratio", "started_at_utc": "20261101T010000Z"}  # fmt: skip
        columns = {}
        for field in msgspec.structs.fields(Row):
            if field.name == "value":
                columns[field.name] = pyarrow.array(numpy.arange(count) / count)
            elif field.type in (int, float):
                columns[field.name] = pyarrow.array(numpy.full(count, 1, dtype=field.type))
            else:
                columns[field.name] = pyarrow.array(texts.get(field.name) or [told.get(field.name, "")] * count)
        folder = store / f"host={host}" / "protocol=p" / "night=2026-01-01"
        folder.mkdir(parents=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "c.parquet")
    return HOSTS * count * SETTINGS_BYTES / 2**20


def read_by(engine: str, store: Path) -> tuple[int, float, int]:
    """(rows, MiB that reading took at its peak, different settings), in a process of its own."""
    command = [sys.executable, "-c", PEAK, str(store), engine, f"{LIMIT_MIB}MB"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=True)
    rows, peak, settings = done.stdout.split()
    return int(rows), float(peak), int(settings)


def test_duckdb_reads_a_store_past_its_memory_limit_within_it(tmp_path):
    unpacked = large_store(tmp_path)
    assert unpacked > 6 * LIMIT_MIB and len(files_of(tmp_path)) == HOSTS
    rows, took, settings = read_by("duckdb", tmp_path)
    assert (rows, settings) == (HOSTS * NIGHTS * SERIES, HOSTS * NIGHTS)
    # Beside what DuckDB may take: its code and Arrow's, the result, and the settings once for each night of a host.
    assert took < 5 * LIMIT_MIB, f"{took:.0f} MiB"
    assert read_by("pandas", tmp_path)[1] > unpacked
