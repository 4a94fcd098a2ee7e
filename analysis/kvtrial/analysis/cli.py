"""The command `kvtrial`. Exit status of analyze: 0 verdict, 3 INCONCLUSIVE, 4 INVALID, 2 unusable input.

A fault of kvtrial itself ends with 2 as well: nothing was decided, and 4 would be read as INVALID.
"""

import argparse
import json
import os
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import msgspec
import yaml

import kvtrial
from kvtrial.analysis import answerschemas
from kvtrial.analysis import campaign as campaigns
from kvtrial.analysis import check as checking
from kvtrial.analysis.history.arguments import add_arguments as add_history_arguments
from kvtrial.analysis.judge import command as judging
from kvtrial.analysis.launch_arm import ended
from kvtrial.analysis.observe import command as observing
from kvtrial.analysis.reproduce import reproduce
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import hazards_of
from kvtrial.record.versions import outside_read_range

REFUSED = 4
INTERRUPTED = 130
BESIDE = "campaigns with several lengths and other models, for the break-even over both"
SHOW_TRACEBACK = "KVTRIAL_TRACEBACK"


def analyze(options: argparse.Namespace) -> int:
    """Gates, effects and verdict of a campaign, from its records; writes every output anew."""
    if options.summaries:
        return _from_summaries(options)
    return _conclude(options.campaign, options.json)


def _conclude(campaign: Path, as_json: bool) -> int:
    done = campaigns.conclude(str(campaign))
    print((campaign / "verdict.json").read_text() if as_json else "\n".join(done["answer"]))
    if done["unfinished"]:
        print(done["cause"], file=sys.stderr)
    return int(done["exit_status"])


def _from_summaries(options: argparse.Namespace) -> int:
    """The verdict of a large fleet from its hosts' summaries; writes verdict.json and metrics.prom alone."""
    from kvtrial.analysis.answer import ten_lines
    from kvtrial.analysis.summaries import verdict_of

    found = verdict_of(options.campaign)
    campaigns.write_verdict(options.campaign, found)
    lines = ten_lines(found, str(options.campaign))
    print((options.campaign / "verdict.json").read_text() if options.json else "\n".join(lines))
    return campaigns.EXIT_STATUS.get(found.verdict, 0)


def summarise(options: argparse.Namespace) -> int:
    """Judge hosts one at a time, each into a summary of kilobytes, for analyze --summaries."""
    from kvtrial.analysis.summaries import summarise as write

    for path in write(options.campaign, options.host or None):
        print(path)
    return 0


def report(options: argparse.Namespace) -> int:
    """Write report.html and brief.md of a campaign, in English or Russian."""
    from kvtrial.analysis.history.file import read_history
    from kvtrial.analysis.lengths import fit_campaign
    from kvtrial.analysis.summaries import Outline

    if options.campaign is None and options.beside:
        raise UnusableInput(
            f"--beside takes every folder after it ({', '.join(map(str, options.beside))}) and no campaign is left; "
            "give the campaign first: kvtrial report CAMPAIGN --beside OTHER..."
        )
    options.campaign = options.campaign or Path("results/latest")
    protocol = Outline(options.campaign).campaign.plan.protocol.name
    store = options.history
    earlier = read_history(store, protocol) if store else campaigns.history_beside(options.campaign, protocol)
    if store is None and earlier is not None:
        # As on the page that a campaign ends with.
        store = options.campaign.resolve().parent / campaigns.HISTORY
    campaigns.write_outputs(
        options.campaign,
        language=options.lang,
        history=earlier,
        beside=[fit for directory in options.beside for fit in fit_campaign(directory)],
        arguments=[
            *(["--history", str(store)] if store else []),
            *(["--beside", *map(str, options.beside)] if options.beside else []),
        ],
    )
    print(options.campaign / "report.html")
    return 0


def merge(options: argparse.Namespace) -> int:
    """Put campaigns over parts of one inventory together, and reach the verdict over all hosts."""
    from kvtrial.analysis.slices import merge as put_together

    put_together(options.parts, options.into, options.may_differ)
    try:
        return _conclude(options.into, options.json)
    except BaseException:
        # What could not be judged is not left behind: the parts are there, and the same command may be run again.
        shutil.rmtree(options.into, ignore_errors=True)
        raise


def compare(options: argparse.Namespace) -> int:
    """Two campaigns side by side: verdicts, effects, gates, pins."""
    from kvtrial.analysis.beside import as_json, compare_campaigns, lines

    found = compare_campaigns(options.a, options.b)
    print(as_json(found) if options.json else "\n".join(lines(found)))
    return 0


def export(options: argparse.Namespace) -> int:
    """A campaign's verdict (openmetrics, json) or table (csv, parquet); a history, or requests, as rows."""
    from kvtrial.analysis.export import command

    return command(options)


def fit_lengths(options: argparse.Namespace) -> int:
    """From which prefix length on an arm pays, of campaigns with several lengths; writes a figure where asked."""
    from kvtrial.analysis.lengths import describe, fit_campaign

    fits = [fit for directory in options.campaign for fit in fit_campaign(directory)]
    if options.plot is not None:
        from kvtrial.analysis.lengthsplot import lengths_plot

        options.plot.write_text(lengths_plot(fits), encoding="utf-8")
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(fits), indent=1).decode())
    else:
        print("\n".join(said for fit in fits for said in describe(fit)))
    return 0


def history(options: argparse.Namespace) -> int:
    """What changed from night to night, and what changed beside. Exit status 5 where it got worse lately."""
    from kvtrial.analysis.history.command import command

    return command(options)


def plan(options: argparse.Namespace) -> int:
    """Runs, hours, RAM and least detectable effect; touches no host."""
    from kvtrial.analysis.planning import announce

    print("\n".join(announce(options.protocol, options.inventory, options.extra)))
    return 0


def show_reproduce(options: argparse.Namespace) -> int:
    """How to repeat the run of a record, as commands."""
    print("\n".join(reproduce(options.record)))
    return 0


def check(options: argparse.Namespace) -> int:
    """Check both arms' launch on a host, as preflight does. Exit status 4 if it must be refused."""
    try:
        answer = checking.answer_of(_launch(options.launch))
    except UnusableInput as error:
        if options.json:
            print(msgspec.json.format(msgspec.json.encode(checking.unusable(str(error))), indent=1).decode())
        raise
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
    else:
        for finding in answer.findings:
            arm = f" ({finding.arm})" if finding.arm else ""
            print(f"{finding.severity} {finding.class_}{arm}: {ended(finding.reason)} {finding.do}")
        for note in answer.notes:
            print(f"Note: {note}")
        print("refused" if answer.refused else "nothing forbids these launches")
    return REFUSED if answer.refused else 0


def _launch(path: Path) -> dict[str, Any]:
    raw = _yaml(path)
    for name in ("host", "vllm", "arms"):
        if not isinstance(raw.get(name), dict):
            said = f"lacks {name}" if name not in raw else f"has {name}: {raw[name]!r}, which is no mapping"
            raise UnusableInput(f"{path} {said}; it must hold the mappings host, vllm and arms.")
    return raw


def hazards(options: argparse.Namespace) -> int:
    """Known defects of a vLLM version, or with --config of these launches in it."""
    from kvtrial.analysis.hazardlist import describe, hits_of_file

    config = None if options.config is None else _yaml(options.config)
    version, hits = hits_of_file(options.vllm, config, str(options.config))
    if note := outside_read_range(version):
        print(note, file=sys.stderr if options.json else sys.stdout)
    known = hazards_of(version)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(known if hits is None else hits), indent=1).decode())
    else:
        print("\n".join(describe(version, known, hits)))
    return 0


def schema(options: argparse.Namespace) -> int:
    """A JSON Schema of this release."""
    print(json.dumps(answerschemas.schema_named(options.name), indent=1))
    return 0


def _yaml(path: Path) -> dict[str, Any]:
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except UnicodeDecodeError as error:
        raise UnusableInput(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise UnusableInput(f"{path} is not YAML ({' '.join(str(error).split())}); mend it.") from None
    if not isinstance(raw, dict):
        raise UnusableInput(f"{path} must hold a mapping.")
    return raw


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtrial", description="Controlled trials of KV-cache settings on vLLM.")
    parser.add_argument("--version", action="version", version=f"kvtrial {kvtrial.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, act: Any) -> argparse.ArgumentParser:
        # What is told apart by its name, as an address that must not be seen, must not have others.
        added = commands.add_parser(name, help=(act.__doc__ or "").splitlines()[0], allow_abbrev=False)
        added.set_defaults(act=act)
        return added

    planned = command("plan", plan)
    planned.add_argument("protocol", nargs="?", default="offload_return", help="name or file; default offload_return")
    planned.add_argument("-i", "--inventory", default=None, help="inventory; default inventories/local")
    planned.add_argument("-e", "--extra-vars", dest="extra", action="append", default=[], help="as ansible-playbook's")
    analyzed = command("analyze", analyze)
    analyzed.add_argument("campaign", type=Path, nargs="?", default=Path("results/latest"))
    analyzed.add_argument("--json", action="store_true")
    analyzed.add_argument("--summaries", action="store_true", help="from summaries/ alone; see kvtrial summarise")
    summarised = command("summarise", summarise)
    summarised.add_argument("campaign", type=Path, nargs="?", default=Path("results/latest"))
    summarised.add_argument("--host", action="append", help="this host alone; may be given again")
    merged = command("merge", merge)
    merged.add_argument("parts", type=Path, nargs="+", help="campaigns that share no host")
    merged.add_argument("--into", type=Path, required=True, metavar="FOLDER", help="a new folder, such as results/all")
    merged.add_argument(
        "--may-differ", action="append", default=[], metavar="NAME", help="driver, kernel, …: see kvtrial_may_differ"
    )
    merged.add_argument("--json", action="store_true")
    reported = command("report", report)
    reported.add_argument("campaign", type=Path, nargs="?", help="default results/latest")
    reported.add_argument("--lang", choices=("en", "ru"), default="en", help="language of report.html and brief.md")
    reported.add_argument(
        "--history", type=Path, metavar="STORE",
        help="earlier campaigns: a store, or what history --json wrote; default the history beside CAMPAIGN",
    )  # fmt: skip
    reported.add_argument("--beside", type=Path, nargs="+", default=[], metavar="CAMPAIGN", help=BESIDE)
    compared = command("compare", compare)
    compared.add_argument("a", type=Path, metavar="A", help="a campaign's folder")
    compared.add_argument("b", type=Path, metavar="B", help="another one's")
    compared.add_argument("--json", action="store_true")
    fitted = command("fit-lengths", fit_lengths)
    fitted.add_argument("campaign", type=Path, nargs="+")
    fitted.add_argument("--json", action="store_true")
    fitted.add_argument("--plot", type=Path, metavar="FILE.svg", help="write the lines and crossings as a figure")
    add_history_arguments(command("history", history))
    exported = command("export", export)
    exported.add_argument(
        "source", type=Path, nargs="*", default=[Path("results/latest")],
        help="a campaign (default results/latest); a history (results/history); with --requests campaigns",
    )  # fmt: skip
    exported.add_argument("--format", choices=("openmetrics", "csv", "parquet", "json"), required=True)
    exported.add_argument("--requests", action="store_true", help="a row a request, where the requests are here")
    exported.add_argument("-o", "--output", type=Path, metavar="FILE", help="default standard output")
    command("reproduce", show_reproduce).add_argument("record", type=Path, help="a record.json")
    checked = command("check", check)
    checked.add_argument("launch", type=Path, help="YAML with host, vllm and arms")
    checked.add_argument("--json", action="store_true")
    observing.add_arguments(command("observe", observing.command))
    judging.add_arguments(command("judge", judging.command))
    known = command("hazards", hazards)
    known.add_argument("--vllm", help="a vLLM version, such as 0.32.0; default that of --config")
    known.add_argument("--config", type=Path, metavar="LAUNCH.yml", help="only those of these launches (as for check)")
    known.add_argument("--json", action="store_true")
    command("schema", schema).add_argument("name", choices=answerschemas.NAMES)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `kvtrial`."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.act(options))
    except UnusableInput as error:
        print(str(error), file=sys.stderr)
        return campaigns.UNUSABLE
    except BrokenPipeError:
        return 0
    except OSError as error:
        print(campaigns.disk_sentence(error), file=sys.stderr)
        return campaigns.UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        # The last net: a user never sees a traceback unless asked for.
        if os.environ.get(SHOW_TRACEBACK):
            traceback.print_exc()
        print(
            f"kvtrial {options.command} failed by a fault in kvtrial {kvtrial.__version__} ({type(error).__name__}: "
            f"{' '.join(str(error).split())}), nothing was decided; run it again with {SHOW_TRACEBACK}=1 in front and "
            f"report what it prints to those who gave you kvtrial, with the input.",
            file=sys.stderr,
        )
        return campaigns.UNUSABLE


if __name__ == "__main__":
    sys.exit(main())
