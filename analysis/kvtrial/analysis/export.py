"""`kvtrial export`, and the summary table: what other tools read."""

import argparse
import io
import sys
from pathlib import Path

import msgspec
import pandas as pd

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.exportrows import export_history, export_requests
from kvtrial.analysis.summary import COUNTS, FLAGS, TEXTS, columns, to_frame
from kvtrial.analysis.textfile import to_openmetrics
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically


def command(options: argparse.Namespace) -> int:
    """A campaign's verdict (openmetrics, json) or runs and phases (csv, parquet); a history, or requests, as rows."""
    sources, form, output = options.source, options.format, options.output
    is_history = len(sources) == 1 and not (sources[0] / "campaign.json").is_file() and sources[0].is_dir()
    if options.requests or is_history:
        what = "requests" if options.requests else f"the rows of {sources[0]}, which is a history,"
        if form not in ("csv", "parquet"):
            raise UnusableInput(f"--format {form}: {what} are written as csv or parquet; give one of the two.")
        if output is None:
            raise UnusableInput(f"{what} may be more than fits into memory, so they go into a file; give -o FILE.")
        rows = export_requests(sources, form, output) if options.requests else export_history(sources[0], form, output)
        print(f"{output}: {rows:,} rows")
        return 0
    if len(sources) > 1:
        raise UnusableInput(f"{len(sources)} sources: one campaign is exported at a time, or their --requests.")
    payload = export_campaign(sources[0], form, sys.stdout.isatty() and output is None)
    if output is None:
        sys.stdout.buffer.write(payload)
    else:
        write_atomically(output, payload)
    return 0


def write_summary(frame: pd.DataFrame, directory: Path) -> dict[str, str]:
    """Write `frame` (a row a run and phase) as summary.csv and summary.parquet into `directory`.

    Each file is whole or absent. Returns file name → sha256 in hex. Raises OSError where it can't be written.
    """
    return {
        "summary.csv": write_atomically(directory / "summary.csv", _csv(frame)),
        "summary.parquet": write_atomically(directory / "summary.parquet", _parquet(frame)),
    }


def export_campaign(directory: Path, form: str, to_terminal: bool = False) -> bytes:
    """A campaign from its records: the verdict as openmetrics or json, or a row a run and phase as csv or parquet.

    Raises UnusableInput for a folder without a campaign, and for parquet that would be written `to_terminal`.
    """
    if form == "parquet" and to_terminal:
        raise UnusableInput("parquet is no text; give -o FILE.parquet, or lead the output into a file.")
    if form in ("csv", "parquet"):
        frame = to_frame(record for runs in campaigns.read_records(directory).values() for record in runs)
        return _csv(frame) if form == "csv" else _parquet(frame)
    verdict = campaigns.analyze(directory)
    if form == "openmetrics":
        return to_openmetrics(verdict).encode()
    return msgspec.json.format(msgspec.json.encode(verdict), indent=1) + b"\n"


def _csv(frame: pd.DataFrame) -> bytes:
    """The table as pyarrow writes it, texts in quotes: of a large fleet pandas takes ten times as long."""
    import pyarrow as arrow
    import pyarrow.csv

    text = io.BytesIO()
    text.write((",".join(frame.columns) + "\n").encode())
    arrow.csv.write_csv(
        arrow.Table.from_pandas(frame, preserve_index=False), text, arrow.csv.WriteOptions(include_header=False)
    )
    return text.getvalue()


def _parquet(frame: pd.DataFrame) -> bytes:
    """The table with a type for each known column, so that one which nobody measured is read beside one that was."""
    import pyarrow as arrow
    import pyarrow.parquet

    table = arrow.Table.from_pandas(frame, preserve_index=False)
    kinds = {**dict.fromkeys(columns(), arrow.float64()), **dict.fromkeys(TEXTS, arrow.string()),
             **dict.fromkeys(COUNTS, arrow.int64()), **dict.fromkeys(FLAGS, arrow.bool_())}  # fmt: skip
    for place, field in enumerate(table.schema):
        if kind := kinds.get(field.name):
            table = table.set_column(place, arrow.field(field.name, kind), table[place].cast(kind, safe=False))
    parquet = io.BytesIO()
    arrow.parquet.write_table(table, parquet)
    return parquet.getvalue()
