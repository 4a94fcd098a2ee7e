"""`kvtrial judge`: a result set, or pairs of other clients' files, in; what it is worth out."""

import argparse
from pathlib import Path

import msgspec

from kvtrial.analysis.judge.peers import METRICS, read_pairs
from kvtrial.analysis.judge.results import DEFAULT_MIN_EFFECT_PCT, Results, read_results
from kvtrial.analysis.judge.worth import Judgement, judge
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.report import paragraph
from kvtrial.record.errors import UnusableInput

UNUSABLE = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `kvtrial judge`."""
    parser.add_argument("results", nargs="?", type=Path, metavar="RESULTS.json", help="runs by pair")
    parser.add_argument(
        "--control", nargs="+", type=Path, metavar="FILE", help="files of vllm bench serve, guidellm, aiperf"
    )
    parser.add_argument("--variant", nargs="+", type=Path, metavar="FILE", help="their pairs, in the same order")
    parser.add_argument("--metric", choices=METRICS, default="ttft_ms", help="of such files; ttft_ms")
    parser.add_argument("--margin", type=float, default=None, metavar="PERCENT", help="the change that matters; 5")
    parser.add_argument("--json", action="store_true")


def command(options: argparse.Namespace) -> int:
    """What a result set that others made is worth, by the same checks and statistics."""
    try:
        judgement = judge(_results(options))
    except UnusableInput as error:
        if not options.json:
            raise
        unusable = Finding("unusable_input", "refuse", str(error), {}, "Mend the input and type the same again.")
        print(_as_json(Judgement(1, "error", "unusable_input", [unusable])))
        return UNUSABLE
    print(_as_json(judgement) if options.json else "\n".join(_lines(judgement)))
    return 0


def _results(options: argparse.Namespace) -> Results:
    if options.margin is not None and not 0 < options.margin < 100:
        raise UnusableInput(f"--margin {options.margin:g} must lie between 0 and 100; it is a change in percent.")
    if options.results is not None and (options.control or options.variant):
        raise UnusableInput("A result set and --control/--variant are both given; give one of the two.")
    if options.results is not None:
        results = read_results(options.results)
        return msgspec.structs.replace(results, min_effect_pct=options.margin) if options.margin else results
    if not options.control or not options.variant:
        raise UnusableInput("Nothing to judge; give RESULTS.json, or --control FILE... and --variant FILE....")
    return read_pairs(options.control, options.variant, options.metric, options.margin or DEFAULT_MIN_EFFECT_PCT)


def _as_json(judgement: Judgement) -> str:
    return msgspec.json.format(msgspec.json.encode(judgement), indent=1).decode()


def _lines(judgement: Judgement) -> list[str]:
    head = f"{judgement.verdict}: {judgement.class_}" + (
        f" (files of {judgement.source})" if judgement.source != "results" else ""
    )
    return [head, *map(paragraph, judgement.findings), *(f"Note: {note}" for note in judgement.notes)]
