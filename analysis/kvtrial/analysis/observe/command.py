"""`kvtrial observe`: files or a live server in, the answer out."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.analysis.observe.answer import Answer, observe
from kvtrial.analysis.observe.client import read_client
from kvtrial.analysis.observe.configuration import Configuration, configuration_of_host, read_configuration
from kvtrial.analysis.observe.finding import Finding
from kvtrial.analysis.observe.live import NoAnswer, Seen, watch
from kvtrial.analysis.observe.logs import Log, read_log
from kvtrial.analysis.observe.pages import Pages, read_pages
from kvtrial.analysis.observe.report import lines_of
from kvtrial.record.errors import UnusableInput
from kvtrial.record.observed import HostFacts, read_host_facts
from kvtrial.record.versions import release

UNUSABLE = 2
API_KEY = "VLLM_API_KEY"
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min)?$")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `kvtrial observe`."""
    parser.add_argument("--metrics", nargs="+", type=Path, metavar="PAGE", help="pages of /metrics in time order")
    parser.add_argument("--interval", type=duration, metavar="SECONDS", help="seconds between the pages")
    parser.add_argument("--control", nargs="+", type=Path, metavar="PAGE", help="pages of a server without the setting")
    parser.add_argument("--url", help="a server that runs, such as http://127.0.0.1:8000")
    parser.add_argument("--window", type=duration, default=60.0, metavar="SECONDS", help="how long to watch it; 60")
    parser.add_argument("--reads", type=int, metavar="N", help="pages of --url; 2, from a window of 45 s on 4")
    parser.add_argument("--log", type=Path, help="the engine's log or journal")
    parser.add_argument("--config", type=Path, help="its launch: YAML as for check, or a `vllm serve` command line")
    parser.add_argument("--arm", help="which arm of --config")
    parser.add_argument("--host", type=Path, metavar="FACTS.json", help="facts of its host")
    parser.add_argument("--client", type=Path, help="what the load client says it sent, as JSON")
    parser.add_argument("--vllm", help="its version, where nothing else says it")
    parser.add_argument("--json", action="store_true")


def duration(text: str) -> float:
    """`60`, `60s` or `1m` in seconds."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * (60 if (found[2] or "").startswith("m") else 1) if found else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration above 0; give seconds, such as 60")
    return seconds


def command(options: argparse.Namespace) -> int:
    """What a server that already runs, or its pages, log and configuration, shows; changes nothing."""
    try:
        answer = answer_of(options)
    except UnusableInput as error:
        if not options.json:
            raise
        print(_as_json(error_answer(error, options)))
        return UNUSABLE
    print(_as_json(answer) if options.json else "\n".join(lines_of(answer)))
    return 0


def _as_json(answer: Answer) -> str:
    return msgspec.json.format(msgspec.json.encode(answer), indent=1).decode()


def error_answer(error: UnusableInput, options: argparse.Namespace) -> Answer:
    """The answer where the input can't be used."""
    sentence = str(error)
    of_pages = bool(options.metrics or options.url) and not _is_about_another_file(sentence, options)
    class_ = (
        "server_does_not_answer"
        if isinstance(error, NoAnswer)
        else "not_vllm_metrics"
        if of_pages
        else "unusable_input"
    )
    do = {
        "server_does_not_answer": "Look whether the process lives (`systemctl status`), and at the end of its log.",
        "not_vllm_metrics": "Fetch http://<host>:<port>/metrics of the vLLM server itself, whole, without a proxy.",
        "unusable_input": "Mend the input and type the same again.",
    }[class_]
    return Answer(1, "error", class_, [Finding(class_, "refuse", sentence, {}, do)])


def answer_of(options: argparse.Namespace) -> Answer:
    """The answer to a command line. Raises UnusableInput."""
    _refuse_nothing(options)
    facts = read_host_facts(options.host) if options.host else None
    silent: NoAnswer | None = None
    seen = None
    try:
        seen = _seen(options) if options.url else None
    except NoAnswer as error:
        if not (options.log or options.host):
            raise
        silent = error
    # After the window, so that it holds what was logged meanwhile.
    log = _log(options.log, options.vllm) if options.log else None
    stated = options.vllm or (seen.version if seen else None) or (facts.vllm_version if facts else None)
    if stated is not None:
        release(stated)
    known = stated or (log.version if log else None)
    pages = _pages(options, seen, known, facts, log)
    connector = None if pages is None else pages.main.last.values.get("store_bytes") is not None
    configuration = _configuration(options, facts, known, connector)
    if known is None and configuration is not None and configuration.version and pages is not None:
        known = configuration.version
        pages = _pages(options, seen, known, facts, log)
    control = _read(options.control, known, options.interval) if options.control else None
    client = read_client(options.client) if options.client else None
    return observe(pages, control, log, configuration, facts, client, known, str(silent) if silent else None)


def _seen(options: argparse.Namespace) -> Seen:
    if options.reads is not None and options.reads < 2:
        raise UnusableInput(f"--reads {options.reads} is too few; give 2 or more.")
    return watch(options.url, options.window, options.reads, api_key=os.environ.get(API_KEY))


def _refuse_nothing(options: argparse.Namespace) -> None:
    if options.log and options.url and not options.log.exists():
        raise UnusableInput(f"{options.log} can't be read (No such file or directory); give an existing file.")
    if options.metrics and options.url:
        raise UnusableInput("--metrics and --url are both given; give files or a server that runs.")
    if options.control and not (options.metrics or options.url):
        raise UnusableInput("--control needs the pages it is held against: --metrics A.prom B.prom.")
    if not any((options.metrics, options.url, options.log, options.config, options.host)):
        raise UnusableInput(
            "Nothing to look at; give --url http://127.0.0.1:8000, or --metrics FILE..., --log FILE, --config FILE or "
            "--host FACTS.json."
        )


def _pages(
    options: argparse.Namespace, seen: Seen | None, version: str | None, facts: HostFacts | None, log: Log | None
) -> Pages | None:
    of_host = facts is not None and any(name.startswith("VLLM_CPU_") for name in facts.env)
    backend = "cpu" if of_host or (log is not None and log.backend == "cpu") else None
    if seen is not None:
        pages = read_pages(seen.pages, version, seen.interval_seconds, backend)
        return msgspec.structs.replace(pages, notes=[*pages.notes, *seen.notes, *_another_model(pages, seen)])
    return _read(options.metrics, version, options.interval, backend) if options.metrics else None


def _another_model(pages: Pages, seen: Seen) -> list[str]:
    names = [window.last.model_name for window in pages.windows if window.last.model_name]
    if seen.models and names and not set(names) & set(seen.models):
        return [
            f"/v1/models names {', '.join(seen.models)}, and /metrics {', '.join(names)}: two servers at one address?"
        ]
    return []


def _read(paths: list[Path], version: str | None, interval_seconds: float | None, backend: str | None = None) -> Pages:
    return read_pages([(path.name, _text(path)) for path in paths], version, interval_seconds, backend)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except UnicodeDecodeError as error:
        raise UnusableInput(
            f"{path.name}: this is no text ({path.stat().st_size} bytes, {error.reason} at byte {error.start}); a "
            f"page that "
            "was stored compressed must be unpacked first."
        ) from None


def _log(path: Path, version: str | None) -> Log:
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    if not text.strip():
        raise UnusableInput(f"{path} is empty; give the engine's log, such as `journalctl -u <unit> -o cat`.")
    log = read_log(text, version)
    if not (log.diagnosis or log.status or log.version or log.facts.connector):
        raise UnusableInput(
            f"{path} ({len(text)} characters) has no line of a vLLM engine; give its log, such as "
            "`journalctl -u <unit> -o cat`."
        )
    return log


def _configuration(
    options: argparse.Namespace, facts: HostFacts | None, version: str | None, connector: bool | None
) -> Configuration | None:
    if options.config:
        return read_configuration(options.config, options.arm, connector)
    return configuration_of_host(facts, version) if facts is not None else None


def _is_about_another_file(sentence: str, options: Any) -> bool:
    others = [options.log, options.config, options.host, options.client]
    return any(path is not None and sentence.startswith(str(path)) for path in others)
