"""The summary table and the verdict as files other tools read."""

import io
from pathlib import Path

import msgspec
import pandas as pd

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.summary import to_frame
from kvtrial.analysis.textfile import to_openmetrics
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically


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
    return frame.to_csv(index=False, lineterminator="\n").encode()


def _parquet(frame: pd.DataFrame) -> bytes:
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False, engine="pyarrow")
    return parquet.getvalue()
