"""The store: STORE/host=H/protocol=P/night=N/CAMPAIGN.parquet, each file whole or absent.

A campaign has one file a host, so that the same campaign added twice is there once, and one that goes on is replaced.
The columns hold host, protocol and night too: a file moved elsewhere is still what it was.
"""

import io
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
import pandas
import pyarrow.parquet
from msgspec import Struct

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.drift import settings_of
from kvtrial.analysis.history.model import Row
from kvtrial.analysis.metrics import find_metric
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Nights, Protocol
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import ComparisonResult, HostVerdict, Verdict

COLUMNS = list(Row.__struct_fields__)
NIGHT = re.compile(r"\d{4}-\d{2}-\d{2}")
PANDAS_MOST_BYTES = 64 * 2**20
"""Of Parquet files. Above, DuckDB aggregates them past memory; pandas takes some twenty times as much as a file."""
DUCKDB_MEMORY = "1GB"


class Added(Struct, frozen=True):
    """What was added: night, hosts, rows, and how many of the hosts' files were there before."""

    campaign: str
    night: str
    hosts: int
    rows: int
    replaced: int


@campaigns.disk_errors_said()
def add(store: Path, directory: Path, night: str | None = None, verdict: Verdict | None = None) -> Added:
    """Put a campaign into the store. `night`: YYYY-MM-DD, by default the date (UTC) on which it was made.

    `verdict`: of this campaign, where it is at hand; else it is drawn from the records. Raises UnusableInput.
    """
    campaign = campaigns.read_campaign(directory)
    made = str(campaign.provenance.get("created_at_utc", ""))
    night = night or campaign.provenance.get("night") or f"{made[:4]}-{made[4:6]}-{made[6:8]}"
    check_night(night)
    verdict = verdict or campaigns.analyze(directory)
    protocol = campaign.plan.protocol
    digests = campaigns.host_plan_digests(directory)
    replaced = rows = hosts = 0
    for host in verdict.hosts:
        records = campaigns.read_host_records(directory, host.host, campaign, digests)
        if not records:
            continue
        settings = msgspec.json.encode(settings_of(records, protocol.control)).decode()
        found = list(rows_of(protocol, host, campaign.campaign, night, made, settings, verdict.evidence or "none"))
        if not found:
            continue
        replaced += _write(store, found)
        hosts, rows = hosts + 1, rows + len(found)
    return Added(campaign.campaign, night, hosts, rows, replaced)


def check_night(night: str) -> None:
    """Raise UnusableInput unless it is a date."""
    try:
        if not NIGHT.fullmatch(night):
            raise ValueError
        pandas.Timestamp(night)
    except ValueError:
        raise UnusableInput(f"{night!r} is no night; give its date, as 2026-11-14.") from None


def rows_of(
    protocol: Protocol, host: HostVerdict, campaign: str, night: str, made: str, settings: str, evidence: str
) -> Iterator[Row]:
    """The rows of one host: effects (or noise) by pair, and the control's own level by run."""
    rule = msgspec.json.encode(protocol.nights).decode() if isinstance(protocol.nights, Nights) else ""
    told: set[tuple[str, str]] = set()
    for result in host.comparisons:
        if not result.arm_values:
            continue
        ratio = result.effect_scale == "ratio"
        shared: dict[str, Any] = {
            "campaign": campaign, "protocol": protocol.name, "host": host.host, "night": night, "started_at_utc": made,
            "metric": result.metric, "unit": result.unit, "better": find_metric(result.metric).better,
            "role": result.role, "scale": result.effect_scale, "margin": result.margin, "word": host.verdict,
            "evidence": evidence, "settings": settings, "rule": rule,
        }  # fmt: skip
        if ratio and min(*result.arm_values, *result.against_values) <= 0:
            continue
        against_phase = result.against_phase or result.phase
        for pair, (arm, other) in enumerate(zip(result.arm_values, result.against_values, strict=True), start=1):
            yield Row(
                kind="noise" if _same_configuration(protocol, result) else "effect", arm=result.arm,
                against=result.against, phase=result.phase, against_phase=against_phase, pair=pair,
                value=math.log(arm) - math.log(other) if ratio else arm - other, **shared,
            )  # fmt: skip
        if result.against != protocol.control or (against_phase, result.metric) in told:
            continue
        told.add((against_phase, result.metric))
        for pair, other in enumerate(result.against_values, start=1):
            yield Row(
                kind="control", arm=result.against, against="", phase=against_phase, against_phase="", pair=pair,
                value=math.log(other) if ratio else other, **shared,
            )  # fmt: skip


def _same_configuration(protocol: Protocol, result: ComparisonResult) -> bool:
    arm, against = protocol.arms.get(result.arm), protocol.arms.get(result.against)
    if arm is None or against is None or result.arm == result.against:
        return False
    return (arm.args, arm.env, arm.sizes, arm.model) == (against.args, against.env, against.sizes, against.model)


def _write(store: Path, rows: list[Row]) -> int:
    """Write a host's rows; whether the campaign was there before. One that was there under another night is moved."""
    first = rows[0]
    of_protocol = store / f"host={quote(first.host, safe='')}" / f"protocol={quote(first.protocol, safe='')}"
    path = of_protocol / f"night={first.night}" / f"{first.campaign}.parquet"
    there = list(of_protocol.glob(f"night=*/{first.campaign}.parquet"))
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    frame = pandas.DataFrame([msgspec.structs.astuple(row) for row in rows], columns=COLUMNS)
    frame.to_parquet(buffer, index=False, engine="pyarrow")
    write_atomically(path, buffer.getvalue())
    for old in there:
        if old != path:
            old.unlink()
    return int(bool(there))


def files_of(store: Path, host: str | None = None, protocol: str | None = None) -> list[Path]:
    """The store's files, in order. Raises UnusableInput where there is none."""
    if not store.is_dir():
        raise UnusableInput(
            f"{store} is no folder; give the store, by default results/history, or add a campaign first."
        )
    hosts = "host=*" if host is None else f"host={quote(host, safe='')}"
    named = "protocol=*" if protocol is None else f"protocol={quote(protocol, safe='')}"
    found = sorted(store.glob(f"{hosts}/{named}/night=*/*.parquet"))
    if not found:
        of = " and ".join(f"{what} {name}" for what, name in (("host", host), ("protocol", protocol)) if name)
        raise UnusableInput(f"{store} holds no campaign{of and f' of {of}'}; --add results/CAMPAIGN adds one.")
    return found


SERIES = ["protocol", "host", "kind", "arm", "against", "phase", "against_phase", "metric"]
ABOUT = ["unit", "better", "role", "scale", "margin", "settings"]


def nights_of(files: list[Path], engine: str | None = None) -> tuple[pandas.DataFrame, str]:
    """A row a series and night, and the engine that made it: `value` (mean), `runs`, `sd`; nights INVALID left out.

    A night's settings, unit and margin are those of its newest campaign. Raises UnusableInput for other files.
    """
    chosen = engine or ("duckdb" if sum(path.stat().st_size for path in files) > PANDAS_MOST_BYTES else "pandas")
    frame = _by_duckdb(files) if chosen == "duckdb" else _by_pandas(files)
    return frame.sort_values([*SERIES, "night"], ignore_index=True), chosen


def rows_with(files: list[Path], columns: Mapping[str, str]) -> pandas.DataFrame:
    """All rows of the files in which every column of `columns` has its value, without the settings of the night."""
    filters = [(name, "==", value) for name, value in columns.items()]
    return _read(files, filters, [name for name in COLUMNS if name != "settings"])


def _read(
    files: list[Path], filters: list[tuple[str, str, str]] | None = None, columns: list[str] | None = None
) -> pandas.DataFrame:
    try:
        # No partitioning: what the folders say stands in the files, and a host called 007 stays a text.
        found = pyarrow.parquet.read_table(
            [str(path) for path in files], columns=columns, filters=filters, partitioning=None
        )
    except Exception as error:
        raise _unreadable(files, error) from None
    return cast(pandas.DataFrame, found.to_pandas())


def _by_pandas(files: list[Path]) -> pandas.DataFrame:
    frame = _read(files)
    _refuse_others(list(frame.columns), files)
    frame = frame[frame["word"] != "INVALID"].sort_values("started_at_utc")
    grouped = frame.groupby([*SERIES, "night"], sort=False)
    values = grouped["value"].agg(value="mean", runs="count", sd="std")
    return pandas.concat([values, grouped[ABOUT].last()], axis=1).reset_index()


def _by_duckdb(files: list[Path]) -> pandas.DataFrame:
    import duckdb

    # A night's settings are a kilobyte, and each series of a night would hold them once more: they go by their hash.
    chosen = {name: "hash(settings)" if name == "settings" else name for name in ABOUT}
    about = ", ".join(f"arg_max({value}, started_at_utc) AS {name}" for name, value in chosen.items())
    source = "FROM read_parquet($files, hive_partitioning = false) WHERE word <> 'INVALID'"
    query = (
        f"SELECT {', '.join([*SERIES, 'night'])}, avg(value) AS value, count(*) AS runs, stddev_samp(value) AS sd, "
        f"{about} {source} GROUP BY ALL"
    )
    texts = f"SELECT hash(settings) AS key, any_value(settings) AS settings {source} GROUP BY key"
    given = {"files": [str(path) for path in files]}
    with tempfile.TemporaryDirectory(prefix="kvtrial-history-") as spill:
        bounds: dict[str, Any] = {
            "memory_limit": DUCKDB_MEMORY,
            "temp_directory": spill,
            "preserve_insertion_order": "false",
        }
        with duckdb.connect(":memory:", config=bounds) as connection:
            try:
                by_hash = dict(connection.execute(texts, given).fetchall())
                # By Arrow, since equal texts become one object on the way to pandas.
                table = connection.sql(query, params=given).to_arrow_table()
            except duckdb.Error as error:
                raise _unreadable(files, error) from None
    frame = cast(pandas.DataFrame, table.to_pandas())
    frame["settings"] = frame["settings"].map(by_hash)
    return frame


def left_out_of(files: list[Path]) -> dict[str, list[str]]:
    """Host → nights on which it was INVALID."""
    frame = _read(files, [("word", "==", "INVALID")], ["host", "night"])
    pairs = frame[["host", "night"]].drop_duplicates().sort_values(["host", "night"])
    return {str(host): [str(night) for night in nights] for host, nights in pairs.groupby("host")["night"]}


def _refuse_others(columns: list[str], files: list[Path]) -> None:
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise UnusableInput(
            f"{files[0].parents[2]} holds files that are not of this store (no column {missing[0]}); take them out."
        )


def _unreadable(files: list[Path], error: Exception) -> UnusableInput:
    for path in files:
        try:
            columns = pyarrow.parquet.read_schema(path).names
        except Exception as cause:
            return UnusableInput(
                f"{path} can't be read ({' '.join(str(cause).split())[:120]}); add its campaign again."
            )
        if missing := [name for name in COLUMNS if name not in columns]:
            return UnusableInput(f"{path} is not of this store (it has no column {missing[0]}); take it out.")
    return UnusableInput(f"the store can't be read ({' '.join(str(error).split())[:160]}).")
