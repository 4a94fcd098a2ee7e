"""Stores made from synthetic campaigns: sixteen nights in November, four hosts, changes planted on their nights."""

import hashlib
import statistics
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy
from build import honest_records, protocol
from kvtrial.analysis.campaign import Campaign
from kvtrial.analysis.history.store import rows_of, write_rows
from kvtrial.analysis.verdict import conclude
from kvtrial.record.plan import HostPlan, Limits, Plan, RunPlan
from kvtrial.record.store import write_atomically
from kvtrial.record.verdict import HostVerdict
from msgspec.structs import replace

NIGHTS = 16
HOSTS = ("g01", "g03", "g07", "g09")


def night(number: int) -> str:
    return (date(2026, 11, 1) + timedelta(days=number)).isoformat()


def plant(host: str, since: str, control: float = 1.0, effect: float = 1.0, invalid: bool = False, **settings: str):
    """From a night on: the control's times a factor, the effect times another, INVALID, and settings that changed."""
    return {"host": host, "since": since, "control": control, "effect": effect, "invalid": invalid,
            "settings": settings}  # fmt: skip


def _verdict() -> dict[str, HostVerdict]:
    found = conclude(protocol(), {host: honest_records(host=host) for host in HOSTS}, "c")
    return {host.host: host for host in found.hosts}


_TEMPLATE: dict[str, HostVerdict] = {}


def store_of(
    store: Path,
    *planted: dict[str, Any],
    nights: int = NIGHTS,
    noise: float = 0.01,
    rule: Any = msgspec.UNSET,
    same_arms: bool = False,
    seed: int = 1,
) -> None:
    """A store as `add` would make it, from one true level and effect per comparison, with noise between runs."""
    if not _TEMPLATE:
        _TEMPLATE.update(_verdict())
    declared = replace(protocol(), nights=rule)
    if same_arms:
        declared = replace(declared, arms=dict.fromkeys(declared.arms, declared.arms["control"]))
    generator = numpy.random.default_rng(seed)
    for number in range(nights):
        by_host = []
        for host in HOSTS:
            here = [p for p in planted if p["host"] == host and p["since"] <= night(number)]
            level = float(numpy.prod([p["control"] for p in here])) if here else 1.0
            effect = float(numpy.prod([p["effect"] for p in here])) if here else 1.0
            settings = {"driver": "580.126", "kernel": "6.8", "vllm_lock": "a" * 64}
            for p in here:
                settings |= p["settings"]
            settings["vllm_lock"] = settings["vllm_lock"][:12]
            comparisons = []
            for result in _TEMPLATE[host].comparisons:
                true = 1.0 if same_arms else 0.2 * effect
                base = 0.2 * level
                against = base * numpy.exp(noise * generator.standard_normal(6))
                arm = base * true * numpy.exp(noise * generator.standard_normal(6))
                comparisons.append(replace(result, arm_values=list(arm), against_values=list(against)))
            word = "INVALID" if any(p["invalid"] for p in here) else "BETTER"
            verdict = replace(_TEMPLATE[host], comparisons=comparisons, verdict=word)
            told = msgspec.json.encode(settings).decode()
            made = night(number).replace("-", "") + "T010000Z"
            by_host.append(list(rows_of(declared, verdict, f"c{number:02}", night(number), made, told, "standin")))
        write_rows(store, declared.name, night(number), f"c{number:02}", by_host)


def host_plan(host: str) -> HostPlan:
    records = honest_records(host=host)
    first = records[0]
    runs = [RunPlan(f"p{r.pair:02}-{r.position + 1}-{r.arm}", r.pair, r.position, r.arm, False, []) for r in records]
    limits = Limits(3600, 60, 60, 60, 60, 60, 1800, 900, 0, 0, 0)
    return HostPlan(
        schema_version="1.0", protocol="offload_return", host=host, seed=1, backend="cpu", vllm_version="0.32.0",
        model=first.model, capacity=first.capacity, launches={r.arm: r.launch for r in records}, runs=runs,
        replacement_pairs=2, limits=limits, if_controller_gone="continue",
    )  # fmt: skip


def campaign_on(results: Path, when: str, hosts: tuple[str, ...]) -> Path:
    """A campaign's folder as it is fetched, with the records of `honest_records`."""
    stamp = when.replace("-", "") + "T010000Z"
    name = f"offload_return-{stamp}"
    directory = results / name
    directory.mkdir(parents=True, exist_ok=True)
    plans = [host_plan(host) for host in hosts]
    plan = Plan(schema_version="1.0", protocol=protocol(), seed=1, hosts=plans, estimates={})
    campaign = Campaign(
        schema_version="1.0", campaign=name, plan=plan, plan_sha256="x", pins={},
        provenance={"created_at_utc": stamp}, own_hit_share=None,
    )  # fmt: skip
    write_atomically(directory / "campaign.json", msgspec.json.encode(campaign))
    (directory / "hosts").mkdir()
    for part in plans:
        digest = hashlib.sha256(msgspec.json.encode(part, order="sorted")).hexdigest()
        (directory / "hosts" / f"{part.host}.json").write_text(
            f'{{"host": "{part.host}", "state": "finished", "reason": ""}}'
        )
        for record in honest_records(host=part.host):
            run = next(r.run for r in part.runs if (r.pair, r.arm) == (record.pair, record.arm))
            phases = [replace(p, requests=p.requests, ttft_median_seconds=_median(p)) for p in record.phases]
            conditions = replace(record.conditions, driver_version="580.126")
            record = replace(record, campaign=name, plan_sha256=digest, run=run, files={}, phases=phases,
                             conditions=conditions)  # fmt: skip
            folder = directory / "runs" / part.host / run
            folder.mkdir(parents=True)
            sha = write_atomically(folder / "record.json", msgspec.json.encode(record))
            (folder / "record.sha256").write_text(f"{sha}  record.json\n")
    return directory


def _median(phase):
    times = [r.ttft_seconds for r in phase.requests if r.error_class is None and r.ttft_seconds is not None]
    return statistics.median(times) if times else None
