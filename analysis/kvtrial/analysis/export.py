"""The summary table as files other tools read."""

import io
from pathlib import Path

import pandas as pd

from kvtrial.record.store import write_atomically


def write_summary(frame: pd.DataFrame, directory: Path) -> dict[str, str]:
    """Write `frame` (a row a run and phase) as summary.csv and summary.parquet into `directory`.

    Each file is whole or absent. Returns file name → sha256 in hex. Raises OSError where it can't be written.
    """
    parquet = io.BytesIO()
    frame.to_parquet(parquet, index=False, engine="pyarrow")
    csv = frame.to_csv(index=False, lineterminator="\n")
    return {
        "summary.csv": write_atomically(directory / "summary.csv", csv.encode()),
        "summary.parquet": write_atomically(directory / "summary.parquet", parquet.getvalue()),
    }
