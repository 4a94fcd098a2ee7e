"""Predicted against measured onset of preemption on the real CPU engine: four mixes, three seeds, a fresh server each.

    python tests/bench/onset.py predict             write results/onset-predicted.json; commit it before measuring
    python tests/bench/onset.py measure [MIX SEED]  one fresh server for each (or that) mix and seed
    python tests/bench/onset.py table               the table, and results/onset.json

Measuring refuses a prediction that is not committed. It needs the engine that `make experiment` installs in .kvtrial/,
and makes its small model (2 layers) in .kvtrial/bench/.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "analysis")]

from kvtrial.analysis.inputs import read_request  # noqa: E402
from kvtrial.analysis.ladder import run_onset  # noqa: E402
from kvtrial.analysis.levels import phases_of, risen  # noqa: E402
from kvtrial.analysis.plan import make_plan, requested_protocol  # noqa: E402
from kvtrial.record.plan import Plan  # noqa: E402
from trial import Trial  # noqa: E402

HERE = Path(__file__).parent
PREDICTED = HERE / "results" / "onset-predicted.json"
RESULT = HERE / "results" / "onset.json"
STATE = ROOT / ".kvtrial" / "bench" / "onset"
MIXES = ("fixed_256_256", "fixed_64_448", "random_128_64to448", "random_skewed")
SEEDS = (1, 2, 3)
MODEL = ("--layers", "2", "--hidden-size", "128", "--intermediate-size", "512", "--attention-heads", "4",
         "--kv-heads", "2", "--head-dim", "32")  # fmt: skip
KV_BYTES_PER_TOKEN = 512


def plan_of(mix: str, seed: int, venv: str = "", model: str = "", port: int = 18790) -> Plan:
    """The plan of a mix: the control alone, as the local inventory has it, on one thread."""
    local = yaml.safe_load((ROOT / "inventories" / "local" / "hosts.yml").read_text())["all"]["hosts"]["this-machine"]
    request = read_request(
        {
            "protocol": str(HERE / "mixes" / f"{mix}.yml"),
            "protocols_dir": str(ROOT / "playbooks" / "protocols"),
            "results_dir": str(STATE / "results"),
            "seed": seed,
            "hosts": {"h1": {
                "may_be_disturbed": True, "backend": "cpu", "vllm_version": "0.32.0", "vllm_venv": venv, "port": port,
                "engine_args": local["kvtrial_engine_args"],
                "engine_env": local["kvtrial_engine_env"] | {"OMP_NUM_THREADS": "1"},
                "model": {"name": "m", "path": model, "revision": "bench", "weights": "random",
                          "kv_bytes_per_token": KV_BYTES_PER_TOKEN, "low_token_id": 32, "high_token_id": 126},
                "ram_reserve_bytes": 2**28,
            }},
        }
    )  # fmt: skip
    return make_plan(request, requested_protocol(request))


def predict() -> None:
    """Write what is predicted for every mix and seed."""
    rows = []
    for mix in MIXES:
        for seed in SEEDS:
            ladder = plan_of(mix, seed).hosts[0].ladder
            assert ladder
            onset = ladder.onset["base"]
            rows.append(
                {"mix": mix, "seed": seed, "levels": list(ladder.levels.values()), **msgspec.to_builtins(onset)}
            )
            print(f"{mix:20} seed {seed}: {onset.low} to {onset.high}, last safe {onset.last_safe}")
    PREDICTED.parent.mkdir(exist_ok=True)
    PREDICTED.write_text(json.dumps(rows, indent=1) + "\n")


def committed() -> list[dict[str, Any]]:
    """The prediction, if it is committed as it stands. Ends the program otherwise."""
    status = subprocess.run(
        ["git", "status", "--porcelain", "--", str(PREDICTED)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    if status or not PREDICTED.exists():
        sys.exit(f"{PREDICTED} is not committed as it stands; predict and commit before you measure.")
    rows: list[dict[str, Any]] = json.loads(PREDICTED.read_text())
    return rows


def measure(mix: str, seed: int, port: int) -> None:
    """One fresh server for a mix and seed; what it did is kept below .kvtrial/bench/onset/."""
    predicted = next(row for row in committed() if (row["mix"], row["seed"]) == (mix, seed))
    venv = Path(os.environ.get("KVTRIAL_ENGINE_VENV") or sorted((ROOT / ".kvtrial/venvs").glob("vllm-0.32.0-*"))[-1])
    model = STATE / "model"
    maker = ROOT / "roles" / "model" / "files" / "make_model.py"
    STATE.mkdir(parents=True, exist_ok=True)
    subprocess.run([venv / "bin" / "python", maker, "make", *MODEL, model], check=True, stdout=subprocess.DEVNULL)
    plan = plan_of(mix, seed, str(venv), str(model), port)
    ladder = plan.hosts[0].ladder
    assert ladder and ladder.onset["base"].low == predicted["low"], "the plan predicts something else by now"
    base = next(run for run in plan.hosts[0].runs if run.arm == "base")
    trial = Trial(STATE / f"{mix}-{seed}", plan, [base])
    done = trial.run(check=False)
    records = trial.records()
    if not records or records[0].outcome != "completed":
        sys.exit(f"{mix}, seed {seed}: no whole run. {done.stderr[-500:]} {records[0].fault if records else ''}")
    record = records[0]
    counts = {phase.concurrency: round(risen([phase], "preemptions") or 0) for phase in phases_of(record, "ladder")}
    row = {**predicted, "measured": run_onset(record), "preemptions": counts, "load": os.getloadavg()[1]}
    (STATE / f"{mix}-{seed}.json").write_text(json.dumps(row))
    print(
        f"{mix}, seed {seed}: predicted {row['low']} to {row['high']}, measured {row['measured']}, {counts}", flush=True
    )


def low_and_high(row: dict[str, Any]) -> tuple[int, int]:
    """Preemptions of a server over the levels up to the last safe one, and at the highest level."""
    counts = {int(level): count for level, count in row["preemptions"].items()}
    return sum(count for level, count in counts.items() if level <= row["last_safe"]), counts[max(counts)]


def table() -> None:
    """Print what was measured so far and write results/onset.json. Ends with 1 where a server does not bear it out.

    Of a server that is not measured here the rows of the last result stay.
    """
    rows = []
    odd = []
    last = json.loads(RESULT.read_text()) if RESULT.exists() else {"rows": [], "date": ""}
    earlier, loads = [], []
    for mix in MIXES:
        for seed in SEEDS:
            file = STATE / f"{mix}-{seed}.json"
            subject = f"{mix}, seed {seed}"
            if not file.exists():
                kept = [row for row in last["rows"] if row["subject"] == subject]
                earlier += [subject] if kept else []
                print(f"{subject:28} {'as in the last result' if kept else 'not measured'}")
                rows += kept
                continue
            row = json.loads(file.read_text())
            loads.append(row.get("load"))
            inside = row["measured"] is not None and row["low"] <= row["measured"] <= row["high"]
            low, high = low_and_high(row)
            if not inside or low or not high:
                odd.append(subject)
            rows += [
                {"subject": subject, "metric": "onset predicted, lowest", "value": row["low"], "unit": "requests"},
                {"subject": subject, "metric": "onset predicted, highest", "value": row["high"], "unit": "requests"},
                {"subject": subject, "metric": "onset measured", "value": row["measured"], "unit": "requests"},
                {"subject": subject, "metric": "inside the prediction", "value": int(inside), "unit": "1 is yes"},
                {"subject": subject, "metric": f"up to {row['last_safe']} in flight, the last safe level", "value": low,
                 "unit": "preemptions"},
                {"subject": subject, "metric": "at the highest level", "value": high, "unit": "preemptions"},
                *(
                    {"subject": subject, "metric": f"at {level} in flight", "value": count, "unit": "preemptions"}
                    for level, count in row["preemptions"].items()
                ),
            ]  # fmt: skip
            counts = ", ".join(f"{level}: {count}" for level, count in row["preemptions"].items())
            print(f"{subject:28} {row['low']:>2} to {row['high']:<2} measured {row['measured']!s:>4} "
                  f"{'inside' if inside else 'OUTSIDE'}   preemptions by level {counts}")  # fmt: skip
    cpu = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                if line.startswith("model name")), platform.machine())  # fmt: skip
    machine = f"{cpu}, {os.cpu_count()} CPUs, vLLM 0.32.0 on the CPU, model of 2 layers, 64 usable blocks of 32 tokens"
    known = [load for load in loads if load is not None]
    machine += f"; load average {min(known):.0f} to {max(known):.0f}" if known else "; load not noted"
    if earlier:
        machine += f"; as measured on or before {last['date']}: {'; '.join(earlier)}"
    RESULT.write_text(
        json.dumps({"benchmark": "onset", "date": datetime.date.today().isoformat(), "machine": machine, "rows": rows},
                   indent=1) + "\n"
    )  # fmt: skip
    if odd:
        sys.exit(f"outside the prediction, preempted below it, or not at the highest level: {'; '.join(odd)}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", choices=["predict", "measure", "table"])
    parser.add_argument("mix", nargs="?", choices=MIXES)
    parser.add_argument("seed", nargs="?", type=int, choices=SEEDS)
    parser.add_argument("--port", type=int, default=18790)
    options = parser.parse_args()
    if options.what == "predict":
        predict()
    elif options.what == "table":
        table()
    else:
        for mix in [options.mix] if options.mix else MIXES:
            for seed in [options.seed] if options.seed else SEEDS:
                measure(mix, seed, options.port)


if __name__ == "__main__":
    main()
