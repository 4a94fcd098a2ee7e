"""The options of `kvtrial history`, apart from what it needs, so that other commands start without that."""

import argparse
from pathlib import Path

STORE = Path("results/history")
NEWEST_NIGHTS = 7
"""An alarm stands while the night on which it was first found is among so many newest nights of the store."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("store", type=Path, nargs="?", default=STORE, help=f"the store; default {STORE}")
    parser.add_argument("--add", type=Path, action="append", default=[], metavar="CAMPAIGN", help="put it in first")
    parser.add_argument("--night", metavar="DATE", help="with --add: its night, as 2026-11-14; else when made")
    parser.add_argument("--host", help="of this host alone")
    parser.add_argument("--protocol", help="of this protocol alone")
    parser.add_argument(
        "--newest", type=int, default=NEWEST_NIGHTS, metavar="N",
        help=f"alarms stand for N nights from when they were found; default {NEWEST_NIGHTS}, 0: never",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--textfile", type=Path, metavar="FILE.prom", help="write alarms for node_exporter")
    parser.add_argument(
        "--webhook", metavar="URL", help="where alarms are posted as JSON, with retries; - reads it from standard input"
    )
