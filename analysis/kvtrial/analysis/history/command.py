"""`kvtrial history`: campaigns into the store, what it says, and alarms.

Exit status: 0 nobody needs to be told of anything, 5 an alarm that was not told before, 6 one that the webhook did not
take, 7 no such alarm, but the textfile could not be written, 2 unusable input.
"""

import argparse
import fcntl
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

import httpx
import msgspec
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from kvtrial.analysis.history.changepoints import LEAST_NIGHTS, LEAST_NIGHTS_BY_SIZE
from kvtrial.analysis.history.model import ChangePoint, FewNights, History
from kvtrial.analysis.history.reading import day, read
from kvtrial.analysis.history.store import add, check_night
from kvtrial.analysis.history.told import remember
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import FOR_OTHERS, write_atomically

ALARM = 5
UNDELIVERED = 6
NO_TEXTFILE = 7
FROM_STDIN = "-"
LOCK = "told.lock"
"""In the store: held by whoever may tell an alarm; others wait."""
FEW_NIGHTS = "few nights: shown by size, not by test"
WEBHOOK_ATTEMPTS = 6
WEBHOOK_FIRST_PAUSE_SECONDS = 1.0
WEBHOOK_LONGEST_PAUSE_SECONDS = 60.0
"""Also where the server asks for more: the alarms are posted again the next time."""
WEBHOOK_TIMEOUT_SECONDS = 10.0


def command(options: argparse.Namespace) -> int:
    """What changed from night to night, with what changed beside; status 5 where it got worse and nobody knows yet.

    What is found with --add or taken by the webhook is known from then on; a look without them changes nothing.
    """
    if options.night is not None:
        if not options.add:
            raise UnusableInput("--night says which night the campaigns of --add are of; give --add with it.")
        check_night(options.night)
    if options.newest < 0:
        raise UnusableInput(f"--newest {options.newest} is no number of nights; give 0 or more.")
    url = sys.stdin.readline().strip() if options.webhook == FROM_STDIN else options.webhook
    if url is not None:
        check_url(url)
    for campaign in options.add:
        done = add(options.store, campaign, options.night)
        print(
            f"{done.campaign}: night {done.night}, {done.hosts} hosts, {done.rows} rows"
            + (f" ({done.replaced} hosts were there, replaced)" if done.replaced else "")
            + (f"; {done.unusable_pairs} pairs have a value of 0 or less, so no ratio" if done.unusable_pairs else ""),
            file=sys.stderr,
        )
    remembers = bool(options.newest and (options.add or url is not None))
    with _alone(options.store) if remembers else nullcontext():
        history = read(options.store, options.host, options.protocol, options.newest)
        as_json = msgspec.json.format(msgspec.json.encode(history), indent=1).decode
        print(as_json() if options.json else "\n".join(lines(history)))
        # First what somebody waits for: a folder that is missing must keep no alarm back. What no webhook took is new.
        why = post(url, history.new_alarms) if url is not None and history.new_alarms else ""
        if why:
            print(f"{why} They are posted again the next time.", file=sys.stderr)
        elif remembers:
            remember(options.store, history.changes, history.nights, history.came_back, options.host, options.protocol)
    written = options.textfile is None or _write_textfile(options.textfile, history)
    if why:
        return UNDELIVERED
    if history.new_alarms:
        return ALARM
    return 0 if written else NO_TEXTFILE


@contextmanager
def _alone(store: Path) -> Iterator[None]:
    """Alone with the store from what is read to what is remembered: looks that end together tell an alarm once.

    A store that can't be locked is looked at all the same: told twice is better than never.
    """
    with ExitStack() as held:
        with suppress(OSError, StopIteration):
            next(store.glob("protocol=*"))  # another folder gets no file
            fcntl.flock(held.enter_context((store / LOCK).open("a")), fcntl.LOCK_EX)
        yield


def _write_textfile(path: Path, history: History) -> bool:
    """Whether the file could be written; if not, the reason is printed."""
    try:
        write_atomically(path, to_textfile(history).encode(), FOR_OTHERS)
    except OSError as error:
        print(
            f"--textfile {path} can't be written ({error.strerror}); name a file in a folder that is there and may be "
            f"written to.",
            file=sys.stderr,
        )
        return False
    return True


def lines(history: History) -> Iterator[str]:
    """For people: the newest first that somebody must look at, then older changes, noise, pooled nights."""
    span = f"{history.nights[0]} to {history.nights[-1]}" if history.nights else "none"
    yield (
        f"{len(history.nights)} nights ({span}), {len(history.hosts)} hosts, {history.series} series tested at a false "
        f"discovery rate of {history.false_discovery_rate:.0%}"
    )
    small = [change for change in history.changes if not change.beyond_margin]
    for change in history.changes:
        if not change.beyond_margin:
            continue
        mark = "ALARM" if change.is_new else "ALARM (told before)" if change.alarm else _direction(change)
        shown = f"p = {change.p_value:.2g}" if change.evidence == "night" else FEW_NIGHTS
        span = f"{change.nights_before} nights before it, {change.nights_after} since"
        yield f"{mark}: {change.sentence} ({shown}, {span})"
    if len(small) == len(history.changes):
        yield "no change beyond its margin"
    if history.few_nights is not None:
        yield _few_nights(history.few_nights)
    if small:
        yield f"{len(small)} changes smaller than their margins; --json lists them"
    for floor in history.noise:
        yield (
            f"noise of {floor.host}, {floor.metric} of {floor.phase}: an A/A pair differs by {floor.sd:.1%} (SD, "
            f"{floor.pairs} pairs of {floor.nights} nights)"
        )
    for trial in history.pooled:
        where = "the fleet" if trial.host == "all" else trial.host
        bounds = f"[{trial.ci_low:.4g}, {trial.ci_high:.4g}]" if trial.pairs else ""
        interval = f"{trial.effect:.4g} {bounds}" if bounds else "no interval"
        yield (
            f"nights pooled by the rule of {trial.protocol} ({trial.spending}, look {trial.look} of {trial.looks}) on "
            f"{where}: {trial.verdict} {interval} at {trial.confidence:.3%}, {trial.pairs} pairs"
            + (f", decided on {day(trial.decided_at)}" if trial.decided_at else "")
            + (f"; {trial.note}" if trial.note else "")
        )
    for protocol, by_host in history.invalid_nights.items():
        for host, nights in by_host.items():
            yield f"left out, INVALID: {host} in {protocol} on {', '.join(day(night) for night in nights)}"


def _few_nights(few: FewNights) -> str:
    """How little is told yet."""
    of = f"{few.nights} night{'s' if few.nights > 1 else ''}"
    wait = f"a test takes {LEAST_NIGHTS - few.nights} more"
    if few.in_half is None or few.in_all is None:
        return (
            f"after {of} nothing is told, however large: a large step is told by its size from the "
            f"{LEAST_NIGHTS_BY_SIZE}rd night on, and {wait}"
        )
    untold = f"; of {few.untold} more, whose nights are fewer or which are no ratios, nothing" if few.untold else ""
    return (
        f"after {of} only a large step is told, and {wait}: tonight a rise of {few.in_half:.0%} or more in half of "
        f"{few.told} series, of {few.in_all:.0%} in all of them{untold}"
    )


def _direction(change: ChangePoint) -> str:
    return "worse" if change.worse else "better"


def to_textfile(history: History) -> str:
    """For node_exporter's textfile collector. No night is a label: each would start new series."""
    registry = CollectorRegistry()
    alarms = Gauge(
        "kvtrial_history_alarms", "Changes for the worse found among the newest nights.", ("protocol", "host"),
        registry=registry,
    )  # fmt: skip
    for protocol in history.protocols:
        for host in [*history.hosts, "all"]:
            found = [c for c in history.alarms if (c.protocol, c.host) == (protocol, host)]
            alarms.labels(protocol, host).set(len(found))
    labels = ("protocol", "host", "kind", "arm", "against", "phase", "metric")
    ratio = Gauge(
        "kvtrial_history_alarm_ratio", "Level from the change on over that before; alarms on scale ratio.", labels,
        registry=registry,
    )  # fmt: skip
    for change in history.alarms:
        if change.ratio is not None:
            where = (change.protocol, change.host, change.kind, change.arm, change.against, change.phase, change.metric)
            ratio.labels(*where).set(change.ratio)
    noise = Gauge(
        "kvtrial_history_noise_sd", "SD of the log ratio of an A/A pair.", ("protocol", "host", "phase", "metric"),
        registry=registry,
    )  # fmt: skip
    for floor in history.noise:
        noise.labels(floor.protocol, floor.host, floor.phase, floor.metric).set(floor.sd)
    Gauge("kvtrial_history_nights", "Nights in the store.", registry=registry).set(len(history.nights))
    return generate_latest(registry).decode()


def check_url(url: str) -> None:
    """Raise UnusableInput unless it is an http or https URL whose host a resolver can be asked for.

    It may hold a secret, and is not repeated.
    """
    try:
        parsed = httpx.URL(url)
        # As the resolver takes it: labels of 1 to 63 characters.
        can_be_asked = bool(parsed.host) and bool(parsed.raw_host.decode("ascii").encode("idna"))
    except (httpx.InvalidURL, TypeError, UnicodeError):
        parsed, can_be_asked = httpx.URL(""), False
    if parsed.scheme not in ("http", "https") or not can_be_asked:
        raise UnusableInput(
            "what --webhook gives is no URL that can be posted to; give one that begins with https:// or http://."
        )


def post(url: str, alarms: Sequence[ChangePoint], first_pause_seconds: float = WEBHOOK_FIRST_PAUSE_SECONDS) -> str:
    """Post alarms as JSON, trying again for half a minute; why it failed in one sentence, empty where it did not.

    `{"text": one line an alarm, "alarms": [ChangePoint…]}`: chat services show `text`. Between attempts pass 1, 2, 4, 8
    and 16 s, or what the server's Retry-After asks for, up to a minute. Whatever fails is told, and nothing is raised:
    the alarm has been printed by then, and its status is still to come.
    """
    body = msgspec.json.encode({"text": "\n".join(change.sentence for change in alarms), "alarms": alarms})
    why, asked = "", 0.0
    for attempt in range(WEBHOOK_ATTEMPTS):
        if attempt:
            pause = max(first_pause_seconds * 2 ** (attempt - 1), asked)
            time.sleep(min(pause, WEBHOOK_LONGEST_PAUSE_SECONDS))
        try:
            answer = httpx.post(
                url, content=body, headers={"content-type": "application/json"}, timeout=WEBHOOK_TIMEOUT_SECONDS
            )
        except httpx.HTTPError as error:
            why, asked = f"{type(error).__name__}: {error}", 0.0
            continue
        except Exception as error:
            # Its text may hold the address. As a rule the environment is at fault, which no further attempt mends.
            why = f"{type(error).__name__}; look at NO_PROXY, HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
            break
        if answer.is_success:
            return ""
        why, asked = f"status {answer.status_code}", _retry_after_seconds(answer)
        if answer.is_redirect:
            why += ", a redirect; give the address that it leads to"
            break
        if answer.is_client_error and answer.status_code not in (408, 425, 429):
            break
    host = httpx.URL(url).host
    return f"the webhook at {host} did not take the {len(alarms)} alarms ({why}); they stand above."


def _retry_after_seconds(answer: httpx.Response) -> float:
    """What Retry-After asks for in seconds; 0 without it, and where it is a date."""
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0
