"""A campaign's folder in, what to adopt out: the texts that playbooks/adopt.yml writes. Reads files, writes none."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from kvtrial.analysis.adopt.decision import Decision, FleetHost, Production, Tried, Wish, decide
from kvtrial.analysis.campaign import read_campaign
from kvtrial.host.units import quoted
from kvtrial.record.errors import UnusableInput
from kvtrial.record.store import record_text
from kvtrial.record.verdict import Verdict
from kvtrial.record.version import refuse_newer

T = TypeVar("T")
SCHEMA = 1
OF_NO_USE = 4
UNIT = "kvtrial-production.service"
SHOWN = "Nothing is written yet: look at the diff above, then run it again with -e adopt_apply=true"
APPLIED = (
    "The fleet's files are as the diff above shows (no diff: as they were); no service was touched. Back: -e "
    "adopt_rollback=true"
)


def adopt(
    directory: Path, fleet: Mapping[str, Any], wish: Mapping[str, Any], unit: Mapping[str, Any], apply: bool = False
) -> dict[str, Any]:
    """What a fleet is to do with a campaign's verdict.

    `directory`: the campaign's folder, or its verdict.json. `unit`: executable, model, address and port of production;
    empty texts take the campaign's. `apply`: whether the texts are then written, which the answer tells.

    Returns action, answer, cause, refusals (names), exit_status (0, or 4 where it is of no use), campaign, group_vars
    (text), and unit (name, exec_start, environment). Raises UnusableInput.
    """
    folder = directory.parent if directory.name == "verdict.json" else directory
    verdict, tried = read_verdict(folder), read_tried(folder)
    hosts = {name: _typed(facts, FleetHost, f"host {name}") for name, facts in fleet.items()}
    decision = decide(verdict, tried, hosts, _typed(wish, Wish, "the request"))
    result: dict[str, Any] = {
        "action": decision.action,
        "answer": decision.answer,
        "cause": decision.cause,
        "refusals": [refusal.name for refusal in decision.refusals],
        "exit_status": OF_NO_USE if decision.cause else 0,
        "campaign": tried.campaign,
        "group_vars": "",
        "unit": {},
    }
    if decision.pins is not None:
        result["answer"] = [*decision.answer, APPLIED if apply else SHOWN]
        result |= {"group_vars": group_vars(decision, decision.pins), "unit": unit_lines(decision.pins, unit)}
    return result


def read_verdict(folder: Path) -> Verdict:
    """verdict.json of a campaign's folder. Raises UnusableInput."""
    path = folder / "verdict.json"
    try:
        raw = path.read_bytes()
        refuse_newer(str(msgspec.json.decode(raw)["schema_version"]), str(path))
        return msgspec.json.decode(raw, type=Verdict)
    except FileNotFoundError:
        raise UnusableInput(
            f"{folder} holds no verdict.json; give a campaign's folder with -e adopt_campaign=results/<campaign> "
            "(kvtrial analyze writes it anew)."
        ) from None
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give a campaign's folder.") from None
    except (msgspec.DecodeError, KeyError, TypeError) as error:
        raise UnusableInput(f"{path} is not a verdict ({error}); kvtrial analyze {folder} writes it anew.") from None


def read_tried(folder: Path) -> Tried:
    """What a campaign tried: its plan, when, and on which GPUs, by its records. Raises UnusableInput."""
    campaign = read_campaign(folder)
    return Tried(
        campaign.campaign,
        str(campaign.provenance.get("created_at_utc", "")),
        list(campaign.plan.hosts),
        {host.host: _gpus(folder / "runs" / host.host) for host in campaign.plan.hosts},
    )


def _gpus(runs: Path) -> list[str]:
    """Names of the GPUs in a host's records."""
    names: set[str] = set()
    for run in sorted(runs.glob("*")):
        try:
            names |= {gpu["name"] for gpu in msgspec.json.decode(record_text(run))["conditions"]["gpus"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(names)


def _typed(value: Mapping[str, Any], shape: type[T], what: str) -> T:
    try:
        return msgspec.convert(dict(value), shape, strict=False)
    except msgspec.ValidationError as error:
        raise UnusableInput(f"{what}: {error}; see docs/adopt.md for what is taken.") from None


def group_vars(decision: Decision, pins: Production) -> str:
    """The text of the fleet's group_vars: the pins, and under kvtrial_production what production starts."""
    body = {
        "kvtrial_vllm_version": pins.vllm_version,
        "kvtrial_model_manifest_revision": pins.model_revision,
        "kvtrial_production": {
            "schema": SCHEMA,
            "campaign": pins.campaign,
            "protocol": pins.protocol,
            "arm": pins.arm,
            "vllm_version": pins.vllm_version,
            "packages_sha256": pins.packages_sha256,
            "model_name": pins.model_name,
            "model_revision": pins.model_revision,
            "gpu": pins.gpu,
            "driver": pins.driver,
            "tier_bytes": pins.tier_bytes,
            "ram_more_bytes": pins.ram_more_bytes,
            "ram_reserve_bytes": pins.ram_reserve_bytes,
            "args": pins.args,
            "env": pins.env,
            "forced": pins.forced,
        },
    }
    said = [
        f"From campaign {pins.campaign}, written by playbooks/adopt.yml; changes are lost.",
        *decision.answer,
        "Back to what was before: playbooks/adopt.yml -e adopt_rollback=true",
    ]
    wrapped = [f"# {line}" for text in said for line in textwrap.wrap(text, 120, subsequent_indent="  ")]
    return (
        "\n".join(["---", *wrapped])
        + "\n"
        + yaml.dump(body, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)
    )


class _Dumper(yaml.SafeDumper):
    """An option with its values stands in one line, all else line by line, indented as people write it."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _sequence(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.Node:
    flat = not items or all(isinstance(item, str) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=flat)


_Dumper.add_representer(list, _sequence)


def unit_lines(pins: Production, unit: Mapping[str, Any]) -> dict[str, Any]:
    """ExecStart and Environment lines of the production unit: the pins, and where production differs from a trial."""
    executable, model = str(unit.get("executable") or pins.executable), str(unit.get("model") or pins.model_path)
    where = ["--host", str(unit.get("address") or "127.0.0.1"), "--port", str(unit.get("port") or 8000)]
    argv = [executable, "serve", model, *where, *(word for words in pins.args for word in words)]
    return {
        "name": UNIT,
        "exec_start": " ".join(quoted(word, True) for word in argv),
        "environment": [quoted(f"{name}={value}", False) for name, value in sorted(pins.env.items())],
    }
