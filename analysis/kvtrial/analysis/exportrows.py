"""A history, or every request of campaigns, as one file of rows for others; never held in memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from kvtrial.analysis import campaign as campaigns
from kvtrial.record.errors import UnusableInput
from kvtrial.record.load import read_results
from kvtrial.record.store import sync_directory

RowForm = Literal["csv", "parquet"]

REQUEST_FIELDS = (
    "phase", "key", "prompt_sha256", "prompt_tokens", "scheduled_ns", "sent_ns", "first_byte_ns", "first_token_ns",
    "last_token_ns", "answer_sha256", "output_tokens", "cached_tokens", "finish_reason",
)  # fmt: skip
"""Of a request as recorded, without its tokens and the gaps between them."""
BATCH_ROWS = 50_000


@campaigns.disk_errors_said()
def export_history(store: Path, form: RowForm, output: Path) -> int:
    """Write all rows of a history; their number. Raises UnusableInput."""
    import duckdb

    from kvtrial.analysis.history.store import COLUMNS, bounded_duckdb, files_of

    files = [str(path) for path in files_of(store)]
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    written = "PARQUET" if form == "parquet" else "CSV, HEADER"
    with bounded_duckdb() as connection:
        try:
            rows = connection.execute(
                f"COPY (SELECT {', '.join(COLUMNS)} FROM read_parquet($files, hive_partitioning = false) "
                f"ORDER BY host, protocol, night, campaign, kind, metric, pair) TO '{_quoted(temporary)}' "
                f"(FORMAT {written})",
                {"files": files},
            ).fetchone()
        except duckdb.Error as error:
            temporary.unlink(missing_ok=True)
            said = " ".join(str(error).split())[:160]
            raise UnusableInput(f"{store} can't be exported to {output} ({said}); look at both.") from None
    _in_place(temporary, output)
    return int(rows[0]) if rows else 0


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


@campaigns.disk_errors_said()
def export_requests(directories: list[Path], form: RowForm, output: Path) -> int:
    """Write a row for each request of each run whose requests.jsonl.zst is here; their number. Raises UnusableInput.

    Runs fetched as summaries keep theirs on the host: where no run has any, that is said.
    """
    import pyarrow as arrow
    import pyarrow.csv
    import pyarrow.parquet

    texts = {
        "campaign",
        "host",
        "run",
        "phase",
        "key",
        "prompt_sha256",
        "answer_sha256",
        "finish_reason",
        "error_class",
    }
    names = ["campaign", "host", "run", *REQUEST_FIELDS, "error_class"]
    schema = arrow.schema([(name, arrow.string() if name in texts else arrow.int64()) for name in names])
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    opened = arrow.parquet.ParquetWriter if form == "parquet" else arrow.csv.CSVWriter
    rows, batch = 0, []
    try:
        with opened(temporary, schema) as writer:
            for row in _requests(directories):
                batch.append(row)
                if len(batch) == BATCH_ROWS:
                    writer.write_table(arrow.Table.from_pylist(batch, schema))
                    rows, batch = rows + len(batch), []
            writer.write_table(arrow.Table.from_pylist(batch, schema))
            rows += len(batch)
        if not rows:
            raise UnusableInput(
                f"no run of {', '.join(map(str, directories))} has its requests here; they stayed on the hosts. Fetch "
                f"them first: the experiment's command with -e kvtrial_fetch=full."
            )
        _in_place(temporary, output)
    finally:
        temporary.unlink(missing_ok=True)
    return rows


def _requests(directories: list[Path]) -> Iterator[dict[str, Any]]:
    for directory in directories:
        campaign = campaigns.read_campaign(directory).campaign
        for path in sorted(directory.glob("runs/*/*/requests.jsonl.zst")):
            named = {"campaign": campaign, "host": path.parents[1].name, "run": path.parent.name}
            for found in read_results(path):
                error = found.get("error") or {}
                fields = {name: found.get(name) for name in REQUEST_FIELDS}
                yield {**named, **fields, "error_class": error.get("error_class")}


def _in_place(temporary: Path, output: Path) -> None:
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(output)
    sync_directory(output.resolve().parent)
