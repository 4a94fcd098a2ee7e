"""Noise of campaigns of one variant against a control, phase by phase, as CSV: python noise.py CAMPAIGN...

A pair's effect is the log of variant / control; its SD sets the least effect that the pairs detect (80 % power).
`start_sd` is the SD of the log of one arm's values over its starts. Needs the package kvtrial.
"""

import csv
import json
import math
import sys
from pathlib import Path
from statistics import median, stdev

from kvtrial.analysis.effect import mde

METRICS = (
    "ttft_median_seconds",
    "inter_token_p95_seconds",
    "e2e_median_seconds",
    "output_throughput_tokens_per_second",
)
COLUMNS = (
    "campaign,phase,metric,control_median,variant_median,geometric_mean_ratio,least_pair_ratio,largest_pair_ratio,"
    "log_ratio_sd,detectable_ratio,difference_sd,log_start_sd_control,log_start_sd_variant"
)


def main(folders: list[str]) -> None:
    """Write one row a campaign, phase and metric."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(COLUMNS.split(","))
    for folder in folders:
        runs = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("runs/*/*/record.json"))]
        variant = next(run["arm"] for run in runs if run["arm"] != "control")
        for name in [phase["name"] for phase in runs[0]["phases"]]:
            for metric in METRICS:
                values = {
                    (run["pair"], run["arm"]): next(p for p in run["phases"] if p["name"] == name)[metric]
                    for run in runs
                }
                if not all(values.values()):
                    continue
                control, other = (
                    [value for (_, arm), value in sorted(values.items()) if arm == wanted]
                    for wanted in ("control", variant)
                )
                logs = [math.log(b / a) for a, b in zip(control, other, strict=True)]
                differences = [b - a for a, b in zip(control, other, strict=True)]
                numbers = (
                    median(control),
                    median(other),
                    math.exp(sum(logs) / len(logs)),
                    math.exp(min(logs)),
                    math.exp(max(logs)),
                    stdev(logs),
                    mde(stdev(logs), len(logs)),
                    stdev(differences),
                    stdev(map(math.log, control)),
                    stdev(map(math.log, other)),
                )
                out.writerow([runs[0]["campaign"], name, metric, *(f"{number:.6g}" for number in numbers)])


if __name__ == "__main__":
    main(sys.argv[1:])
