"""The store: STORE/protocol=P/night=N/CAMPAIGN.parquet, each file whole or absent.

A campaign has one file, its hosts one after the other in row groups, so that a year of nights of a thousand hosts is a
few hundred files, and what is asked of one host reads that host's row groups alone. The same campaign added twice is
there once, and one that goes on is replaced. A campaign that was put together from parts is filed as its parts are.
The columns hold host, protocol and night too: a file moved elsewhere is still what it was.
"""

import io
import math
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import msgspec
import pandas
import pyarrow
import pyarrow.parquet
from msgspec import Struct

from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis.drift import WORKLOAD, settings_of
from kvtrial.analysis.history.model import Row
from kvtrial.analysis.metrics import find_metric
from kvtrial.analysis.summaries import Judged, Outline, judged_before
from kvtrial.record.errors import UnusableInput
from kvtrial.record.protocol import Nights, Protocol
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import ComparisonResult, HostVerdict

COLUMNS = list(Row.__struct_fields__)
NIGHT = re.compile(r"\d{4}-\d{2}-\d{2}")
PANDAS_MOST_BYTES = 64 * 2**20
"""Of Parquet files. Above, DuckDB aggregates them past memory; pandas takes some twenty times as much as a file."""
DUCKDB_MEMORY_MIB = 1000
DUCKDB_ROWS_A_MIB = 500
"""Rows that DuckDB aggregates at a time, by its memory: a group takes some 700 bytes, and each row may be one."""
ROWS_A_GROUP = 10_000
"""At least so many rows go into a row group, always those of whole hosts."""
_TYPES = {int: pyarrow.int64(), float: pyarrow.float64()}
_SCHEMA = pyarrow.schema(
    [(field.name, _TYPES.get(field.type, pyarrow.string())) for field in msgspec.structs.fields(Row)]
)


class Added(Struct, frozen=True):
    """What was added: night, hosts, rows, how many of these hosts were there before, and the pairs without a ratio."""

    campaign: str
    night: str
    hosts: int
    rows: int
    replaced: int
    unusable_pairs: int = 0


@campaigns.disk_errors_said()
def add(store: Path, directory: Path, night: str | None = None, judged: Judged | None = None) -> Added:
    """Put a campaign into the store. `night`: YYYY-MM-DD, by default the date (UTC) on which it was made.

    `judged`: this campaign's, where it is at hand; else it is drawn from its summaries or records. Each host goes under
    the campaign that its records bear, so that one put together from parts takes its parts' places. Raises
    UnusableInput.
    """
    if night is not None:
        check_night(night)
    judged = judged or judged_before(directory)
    campaign, protocol, outline = judged.campaign, judged.campaign.plan.protocol, Outline(directory)
    hosts_of: dict[str, list[HostVerdict]] = {}
    for host in judged.verdict.hosts:
        hosts_of.setdefault(campaign.campaign_of.get(host.host, campaign.campaign), []).append(host)
    replaced = rows = hosts = unusable = 0
    nights = []
    for part, of_part in hosts_of.items():
        told = campaign.provenance.get("parts", {}).get(part, campaign.provenance)
        made = str(told.get("created_at_utc", ""))
        of_night = night or told.get("night") or f"{made[:4]}-{made[4:6]}-{made[6:8]}"
        check_night(of_night)
        nights.append(of_night)
        by_host = []
        for host in of_part:
            if not (records := judged.records.get(host.host)):
                continue
            of_host = settings_of(records, protocol.control)
            if workload := outline.workload_of(host.host):
                of_host = {WORKLOAD: workload, **of_host}
            settings = msgspec.json.encode(of_host).decode()
            evidence = judged.verdict.evidence or "none"
            found = list(rows_of(protocol, host, part, of_night, made, settings, evidence))
            unusable += sum(map(_pairs_without_ratio, host.comparisons))
            if found:
                by_host.append(found)
        planned = [name for name in outline.hosts if campaign.campaign_of.get(name, campaign.campaign) == part]
        replaced += write_rows(store, protocol.name, of_night, part, by_host, planned)
        hosts, rows = hosts + len(by_host), rows + sum(map(len, by_host))
    return Added(campaign.campaign, ", ".join(sorted(set(nights))), hosts, rows, replaced, unusable)


class NoNight(UnusableInput):
    """A night that is no date."""


def check_night(night: str) -> None:
    """Raise NoNight unless it is a date."""
    try:
        if not NIGHT.fullmatch(night):
            raise ValueError
        pandas.Timestamp(night)
    except ValueError:
        raise NoNight(f"{night!r} is no night; give its date, as 2026-11-14.") from None


_STRONGEST = {"primary": 0, "guard": 1, "secondary": 2}


def _pairs_without_ratio(result: ComparisonResult) -> int:
    pairs = zip(result.arm_values, result.against_values, strict=True)
    return sum(min(pair) <= 0 for pair in pairs) if result.effect_scale == "ratio" else 0


def rows_of(
    protocol: Protocol, host: HostVerdict, campaign: str, night: str, made: str, settings: str, evidence: str
) -> Iterator[Row]:
    """The rows of one host: effects (or noise) by pair, and the control's own level by run.

    A pair of which one value is not above 0 has no ratio and no row; the other pairs stay. A level that several
    comparisons share takes the strongest role among them.
    """
    rule = msgspec.json.encode(protocol.nights).decode() if isinstance(protocol.nights, Nights) else ""
    told: set[tuple[str, str]] = set()
    for result in sorted(host.comparisons, key=lambda found: _STRONGEST[found.role]):
        ratio = result.effect_scale == "ratio"
        shared: dict[str, Any] = {
            "campaign": campaign, "protocol": protocol.name, "host": host.host, "night": night, "started_at_utc": made,
            "metric": result.metric, "unit": result.unit, "better": find_metric(result.metric).better,
            "role": result.role, "scale": result.effect_scale, "margin": result.margin, "word": host.verdict,
            "evidence": evidence, "settings": settings, "rule": rule,
        }  # fmt: skip
        against_phase = result.against_phase or result.phase
        for pair, (arm, other) in enumerate(zip(result.arm_values, result.against_values, strict=True), start=1):
            if ratio and min(arm, other) <= 0:
                continue
            yield Row(
                kind="noise" if _same_configuration(protocol, result) else "effect", arm=result.arm,
                against=result.against, phase=result.phase, against_phase=against_phase, pair=pair,
                value=math.log(arm) - math.log(other) if ratio else arm - other, **shared,
            )  # fmt: skip
        if result.against != protocol.control or (against_phase, result.metric) in told:
            continue
        told.add((against_phase, result.metric))
        for pair, other in enumerate(result.against_values, start=1):
            if ratio and other <= 0:
                continue
            yield Row(
                kind="control", arm=result.against, against="", phase=against_phase, against_phase="", pair=pair,
                value=math.log(other) if ratio else other, **shared,
            )  # fmt: skip


def _same_configuration(protocol: Protocol, result: ComparisonResult) -> bool:
    arm, against = protocol.arms.get(result.arm), protocol.arms.get(result.against)
    if arm is None or against is None or result.arm == result.against:
        return False
    return (arm.args, arm.env, arm.sizes, arm.model) == (against.args, against.env, against.sizes, against.model)


def write_rows(
    store: Path,
    protocol: str,
    night: str,
    campaign: str,
    by_host: Sequence[Sequence[Row]],
    planned: Collection[str] | None = None,
) -> int:
    """Write a campaign's rows in place of those that were there, under whatever night; how many hosts were there.

    `planned`: its hosts; None: all that are there. Of these nothing stays without a row. Others stay as they are: they
    are of another controller's campaign, made in the same second.
    """
    of_protocol = store / f"protocol={quote(protocol, safe='')}"
    path = of_protocol / f"night={night}" / f"{campaign}.parquet"
    there = sorted(of_protocol.glob(f"night=*/{campaign}.parquet"), key=lambda file: file.stat().st_mtime_ns)
    replaced: set[str] = set()
    others: dict[str, list[Row]] = {}
    for old in there:
        # A damaged one names no host, and adding its campaign again is what mends it.
        with suppress(UnusableInput):
            hosts = set(_read([old], columns=["host"])["host"])
            replaced |= hosts
            for host in sorted(hosts - set(hosts if planned is None else planned)):
                found = _read([old], [("host", "==", host)], COLUMNS).to_dict("records")
                others[host] = [Row(**cast(dict[str, Any], row)) for row in found]
    rows = [*by_host, *others.values()]
    if rows:
        path = path if by_host else there[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _as_parquet(rows))
    for old in there:
        if old != path or not rows:
            old.unlink()
    return len(replaced & {rows[0].host for rows in by_host})


def _as_parquet(by_host: Sequence[Sequence[Row]]) -> bytes:
    buffer = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(buffer, _SCHEMA) as writer:
        waiting: list[Row] = []
        for rows in by_host:
            waiting += rows
            if len(waiting) >= ROWS_A_GROUP:
                writer.write_table(_as_table(waiting), row_group_size=len(waiting))
                waiting = []
        if waiting:
            writer.write_table(_as_table(waiting), row_group_size=len(waiting))
    return buffer.getvalue()


def _as_table(rows: Sequence[Row]) -> pyarrow.Table:
    return pyarrow.table({name: [getattr(row, name) for row in rows] for name in COLUMNS}, schema=_SCHEMA)


def files_of(store: Path, protocol: str | None = None, host: str | None = None) -> list[Path]:
    """The store's files of a protocol, in order; `host`: what is looked for in them. Raises UnusableInput for none.

    Of a campaign that lies under two nights, since its move was cut off, the newer file counts.
    """
    if not store.is_dir():
        raise UnusableInput(
            f"{store} is no folder; give the store, by default results/history, or add a campaign first."
        )
    if old := next(iter(store.glob("host=*/protocol=*")), None):
        raise UnusableInput(
            f"{store} has folders of an earlier layout ({old.parent.name}), which are not read; move them away, and "
            f"add their campaigns again (kvtrial history {store} --add CAMPAIGN...)."
        )
    named = "protocol=*" if protocol is None else f"protocol={quote(protocol, safe='')}"
    newest: dict[tuple[Path, str], Path] = {}
    for path in sorted(store.glob(f"{named}/night=*/*.parquet"), key=lambda file: file.stat().st_mtime_ns):
        newest[path.parents[1], path.name] = path
    if not newest:
        raise nothing_of(store, host, protocol)
    return sorted(newest.values())


def nothing_of(store: Path, host: str | None, protocol: str | None) -> UnusableInput:
    """What is said where the store holds nothing of what was asked for."""
    of = " and ".join(f"{what} {name}" for what, name in (("host", host), ("protocol", protocol)) if name)
    return UnusableInput(f"{store} holds no campaign{of and f' of {of}'}; --add results/CAMPAIGN adds one.")


SERIES = ["protocol", "host", "kind", "arm", "against", "phase", "against_phase", "metric"]
ABOUT = ["unit", "better", "role", "scale", "margin"]
_TEXTS = [*SERIES, "night", *(name for name in ABOUT if name != "margin")]
SettingsTexts = dict[tuple[str, str], dict[str, str]]
"""(protocol, host) → night → the settings of its newest campaign that was not INVALID, as JSON."""


def engine_for(files: Sequence[Path]) -> str:
    """pandas for stores of normal size, duckdb for larger ones."""
    return "duckdb" if sum(path.stat().st_size for path in files) > PANDAS_MOST_BYTES else "pandas"


def nights_of(files: list[Path], engine: str, host: str | None = None) -> tuple[pandas.DataFrame, SettingsTexts]:
    """A row a series and night: `value` (mean), `runs`, `sd`; and what each host was on each night.

    Left out are nights that were INVALID, and what only explains: secondary comparisons. A night's unit and margin are
    those of its newest campaign. Raises UnusableInput for other files.
    """
    frame, settings = (_by_duckdb if engine == "duckdb" else _by_pandas)(files, host)
    return frame.sort_values([*SERIES, "night"], ignore_index=True), settings


def rows_with(files: list[Path], columns: Mapping[str, Any], names: list[str]) -> pandas.DataFrame:
    """Columns `names` of the rows that count in which every column of `columns` has its value."""
    filters = [(name, "==", value) for name, value in columns.items()]
    return _read(files, [*filters, ("word", "!=", "INVALID")], names)


def different_rows_with(files: list[Path], columns: Mapping[str, Any], names: list[str]) -> pandas.DataFrame:
    """As rows_with, each row that differs from others once; one file is in memory at a time."""
    found = [rows_with([path], columns, names).drop_duplicates() for path in files]
    return pandas.concat(found, ignore_index=True).drop_duplicates(ignore_index=True)


def _read(
    files: list[Path], filters: list[tuple[str, str, Any]] | None = None, columns: list[str] | None = None
) -> pandas.DataFrame:
    try:
        # No partitioning: what the folders say stands in the files, and a host called 007 stays a text.
        found = pyarrow.parquet.read_table(
            [str(path) for path in files], columns=columns, filters=filters or None, partitioning=None
        )
    except Exception as error:
        raise _unreadable(files, error) from None
    return cast(pandas.DataFrame, found.to_pandas())


def _by_pandas(files: list[Path], host: str | None) -> tuple[pandas.DataFrame, SettingsTexts]:
    frame = _read(files, [("host", "==", host)] if host else None)
    _refuse_others(list(frame.columns), files)
    frame = frame[frame["word"] != "INVALID"].sort_values("started_at_utc", kind="stable")
    newest = frame.drop_duplicates(["protocol", "host", "night"], keep="last")
    settings = _as_settings(zip(*(newest[name] for name in ("protocol", "host", "night", "settings")), strict=True))
    frame = frame[(frame["role"] != "secondary") | (frame["kind"] == "noise")]
    grouped = frame.groupby([*SERIES, "night"], sort=False)
    values = grouped["value"].agg(value="mean", runs="count", sd="std")
    return pandas.concat([values, grouped[ABOUT].last()], axis=1).reset_index(), settings


def _as_settings(rows: Iterable[tuple[str, str, str, str]]) -> SettingsTexts:
    found: SettingsTexts = {}
    # Hosts and nights are alike as a rule, and are to share what they are.
    same: dict[str, str] = {}
    for protocol, host, night, text in rows:
        found.setdefault((protocol, host), {})[night] = same.setdefault(text, text)
    return found


@contextmanager
def bounded_duckdb() -> Iterator[Any]:
    """A connection that keeps to DUCKDB_MEMORY_MIB and spills what is more."""
    import duckdb

    with tempfile.TemporaryDirectory(prefix="kvtrial-history-") as spill:
        bounds: dict[str, Any] = {
            "memory_limit": f"{DUCKDB_MEMORY_MIB}MB",
            "temp_directory": spill,
            "preserve_insertion_order": "false",
            "threads": 2,
        }
        with duckdb.connect(":memory:", config=bounds) as connection:
            # It would stand in the midst of what is printed for others to read.
            connection.execute("SET enable_progress_bar = false")
            yield connection


def _by_duckdb(files: list[Path], host: str | None) -> tuple[pandas.DataFrame, SettingsTexts]:
    """Some hosts at a time: all groups of a GROUP BY are in memory together, whatever may be spilled."""
    import duckdb

    counted = "word <> 'INVALID' AND host BETWEEN $first AND $last"
    source = f"FROM read_parquet($files, hive_partitioning = false) WHERE {counted}"
    about = ", ".join(f"arg_max({name}, started_at_utc) AS {name}" for name in ABOUT)
    series = (
        f"SELECT {', '.join([*SERIES, 'night'])}, avg(value) AS value, count(*) AS runs, stddev_samp(value) AS sd, "
        f"{about} {source} AND (role <> 'secondary' OR kind = 'noise') GROUP BY ALL"
    )
    # Of a night's settings, a kilobyte, only the hash goes through the aggregation.
    hashed = (
        f"SELECT protocol, host, night, arg_max(hash(settings), started_at_utc) {source} GROUP BY protocol, host, night"
    )
    texts = f"SELECT hash(settings) AS key, any_value(settings) {source} GROUP BY key"
    given: dict[str, Any] = {"files": [str(path) for path in files]}
    tables: list[pyarrow.Table] = []
    settings: SettingsTexts = {}
    with bounded_duckdb() as connection:
        try:
            sizes = connection.execute(
                "SELECT host, count(*) FROM read_parquet($files, hive_partitioning = false) GROUP BY 1 ORDER BY 1",
                given,
            ).fetchall()
            for first, last in _batches([size for size in sizes if host in (None, size[0])]):
                given |= {"first": first, "last": last}
                found = connection.sql(series, params=given).to_arrow_table()
                # Names repeat in every row: they are kept once.
                for name in _TEXTS:
                    at = found.column_names.index(name)
                    found = found.set_column(at, name, found.column(at).dictionary_encode())
                tables.append(found)
                by_hash = dict(connection.execute(texts, given).fetchall())
                settings |= _as_settings(
                    (protocol, name, night, by_hash[key])
                    for protocol, name, night, key in connection.execute(hashed, given).fetchall()
                )
        except duckdb.Error as error:
            raise _unreadable(files, error) from None
    if not tables:
        return pandas.DataFrame(columns=[*SERIES, "night", "value", "runs", "sd", *ABOUT]), settings
    frame = cast(pandas.DataFrame, pyarrow.concat_tables(tables).unify_dictionaries().to_pandas())
    for name in _TEXTS:
        frame[name] = frame[name].cat.reorder_categories(sorted(frame[name].cat.categories))
    return frame, settings


def _batches(sizes: Sequence[tuple[str, int]]) -> Iterator[tuple[str, str]]:
    """First and last host of each batch, by the rows of each host."""
    most = DUCKDB_MEMORY_MIB * DUCKDB_ROWS_A_MIB
    batch: list[str] = []
    rows = 0
    for host, count in sizes:
        if batch and rows + count > most:
            yield batch[0], batch[-1]
            batch, rows = [], 0
        batch.append(host)
        rows += count
    if batch:
        yield batch[0], batch[-1]


def invalid_nights_of(files: list[Path], host: str | None = None) -> dict[str, dict[str, list[str]]]:
    """Protocol → host → nights on which it was INVALID."""
    filters = [("word", "==", "INVALID"), *([("host", "==", host)] if host else [])]
    columns = ["protocol", "host", "night"]
    frame = _read(files, filters, columns)[columns].drop_duplicates().sort_values(columns)
    found: dict[str, dict[str, list[str]]] = {}
    for protocol, name, night in frame.itertuples(index=False):
        found.setdefault(str(protocol), {}).setdefault(str(name), []).append(str(night))
    return found


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
