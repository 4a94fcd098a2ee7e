"""The controller's part of playbooks/observe.yml: what the hosts told goes into files, and `kvtrial observe` is asked.

Each server has a folder: facts.json, 0.prom, 1.prom, server.log, answer.json. Nothing is asked of a host here.
"""

import argparse
import base64
import contextlib
import importlib
import io
import json
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtrial.analysis.fleetview import Observed, fleet_lines
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import write_atomically

UNUSABLE = 2
Ask = Callable[[list[str]], tuple[int, str]]


Told = Mapping[str, Mapping[str, Any]]


def observe_fleet(first: Told, second: Told, directory: Path, ask: Ask | None = None) -> dict[str, Any]:
    """The answer of a fleet. `first`, `second`: host -> what module server_info returned at either look.

    A host whose first look holds no `servers` was lost, and its `msg` says why.
    Returns answer (lines), servers ({name: class}), directory, exit_status (2 where no server could be read) and cause.
    """
    observed, without, lost, seconds = [], [], {}, []
    for host, told in sorted(first.items()):
        servers = told.get("servers")
        if servers is None:
            words = [str(told.get(name) or "").strip().splitlines() for name in ("msg", "module_stderr")]
            lost[host] = "; ".join(line[0].rstrip(".") for line in words if line) or "it was not reached"
            continue
        again = {server.get("port"): server for server in second.get(host, {}).get("servers") or []}
        if not servers:
            without.append(host)
        for server in servers:
            folder = directory / _plain(host) / str(server.get("port") or "socket")
            one, interval = _one(host, server, again.get(server.get("port"), {}), folder, ask or kvtrial)
            observed.append(one)
            seconds += [interval] if interval else []
    window = f"two looks {min(seconds):.0f} s apart" if seconds else "one look"
    answer = list(fleet_lines(observed, without, lost, window))
    read = [server for server in observed if not server.error]
    cause = "" if read else _cause(observed, without, lost)
    result = {
        "servers": {server.name: server.class_ for server in observed},
        "directory": str(directory),
        "exit_status": 0 if read else UNUSABLE,
        "cause": cause,
        "answer": [*answer, f"Kept in {directory}."] if observed else answer,
    }
    if observed:
        write_atomically(directory / "fleet.json", json.dumps(result, indent=1, ensure_ascii=False).encode())
    return result


def _cause(observed: list[Observed], without: list[str], lost: Mapping[str, str]) -> str:
    if observed:
        return f"No server could be read: {observed[0].name}: {observed[0].error}"
    if lost and not without:
        return f"No host could be asked: {next(iter(sorted(lost.items())))[1]}"
    return (
        f"No vLLM server was found on {', '.join(without)}; is one running there, and may this user see its processes? "
        "A port can be named: -e '{\"observe_ports\": [8000]}'."
    )


def _one(
    host: str, server: Mapping[str, Any], again: Mapping[str, Any], folder: Path, ask: Ask
) -> tuple[Observed, float | None]:
    """One server's files, and what observe says of them."""
    port = server.get("port")
    folder.mkdir(parents=True, exist_ok=True)
    facts = {**server.get("facts", {}), "host": f"{host}:{port}"}
    write_atomically(folder / "facts.json", json.dumps(facts, indent=1, ensure_ascii=False).encode())
    command = ["observe", "--host", str(folder / "facts.json")]
    pages, times = [], []
    for number, page in enumerate((server.get("page") or {}, again.get("page") or {})):
        if page.get("text"):
            write_atomically(folder / f"{number}.prom", _unpacked(page["text"]))
            pages.append(str(folder / f"{number}.prom"))
            times.append(float(page["monotonic_seconds"]))
    if pages:
        command += ["--metrics", *pages]
    interval = times[1] - times[0] if len(times) == 2 else None
    if interval:
        command += ["--interval", f"{interval:.3f}"]
    log = again.get("log")
    if log:
        write_atomically(folder / "server.log", _unpacked(log["text"]))
        command += ["--log", str(folder / "server.log")]
    if not pages and not log:
        return Observed(host, port, {}, _unread(server, again)), None
    answer, error = _asked(command, ask)
    if error and log and pages:
        # A log that is none of an engine's must not hide what the pages say.
        answer, error = _asked(command[: command.index("--log")], ask)
    write_atomically(folder / "answer.json", json.dumps(answer, indent=1, ensure_ascii=False).encode())
    return Observed(host, port, answer, error), interval


def _asked(command: list[str], ask: Ask) -> tuple[dict[str, Any], str]:
    """(answer, error) of a command line of kvtrial; the error is the sentence that it refuses its input with."""
    status, text = ask([*command, "--json"])
    try:
        answer = json.loads(text)
    except ValueError:
        return {}, text.strip().splitlines()[-1] if text.strip() else f"kvtrial observe ended with {status}"
    if status == 0:
        return answer, ""
    findings = answer.get("findings") or [{}]
    return {}, findings[0].get("reason") or f"kvtrial observe ended with {status}"


def _unread(server: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    why = (server.get("page") or {}).get("error") or (again.get("page") or {}).get("error") or "nothing was read"
    return f"/metrics could not be read ({why}), and no log was found; is it still starting, or on another address?"


def kvtrial(arguments: list[str]) -> tuple[int, str]:
    """(status, what it prints) of a command line of `kvtrial observe`, in this process.

    A hundred Pythons, each with all that the other commands import, take minutes.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command = importlib.import_module("kvtrial.analysis.observe.command")
            parser = argparse.ArgumentParser(prog="kvtrial observe")
            command.add_arguments(parser)
            status = int(command.command(parser.parse_args(arguments[1:])))
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else UNUSABLE
        except UnusableInput as error:
            print(error)
            status = UNUSABLE
    return status, out.getvalue() or err.getvalue()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _plain(name: str) -> str:
    """A host's name as a folder's."""
    plain = re.sub(r"[^\w.-]", "_", name).lstrip(".")
    if not plain:
        raise UnusableInput(f"host {name!r} can't name a folder; give it a name with letters in the inventory.")
    return plain
