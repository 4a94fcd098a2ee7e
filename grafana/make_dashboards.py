#!/usr/bin/env python3
"""Write the two dashboards beside this file: `python3 grafana/make_dashboards.py`. What is written is committed.

engines.json looks at two running vLLM servers, the control and the variant, by Prometheus; history.json at what
kvtrial's metrics.prom leaves for node_exporter's textfile collector. Panels are data here, and everything that Grafana
wants around them is said once.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 41
WIDTH, HEIGHT = 12, 8
CONTROL, VARIANT = '{instance="$control"}', '{instance="$variant"}'

Query = tuple[str, str]
"""(PromQL, legend)."""


def both(expression: str, legend: str = "") -> list[Query]:
    """One expression for either arm; its selector stands where the expression says SELECTOR."""
    after = f" {legend}" if legend else ""
    return [
        (expression.replace("SELECTOR", CONTROL), f"control{after}"),
        (expression.replace("SELECTOR", VARIANT), f"variant{after}"),
    ]


def quantile(metric: str, share: float) -> list[Query]:
    """A quantile of a histogram for either arm."""
    inside = f"sum by (le) (rate({metric}_bucketSELECTOR[$__rate_interval]))"
    return both(f"histogram_quantile({share}, {inside})", f"p{share * 100:.0f}")


def mean(metric: str) -> list[Query]:
    """The mean of a histogram's values for either arm."""
    over = "[$__rate_interval]"
    return both(f"sum(rate({metric}_sumSELECTOR{over})) / sum(rate({metric}_countSELECTOR{over}))")


def rate(metric: str, legend: str = "", labels: str = "") -> list[Query]:
    """A counter's growth a second for either arm, of some labels."""
    found = []
    for expression, name in both(f"sum(rate({metric}SELECTOR[$__rate_interval]))", legend):
        found.append((expression.replace('"}[', f'", {labels}}}[') if labels else expression, name))
    return found


ENGINES: list[tuple[str, str, str, list[Query]]] = [
    ("Time to first token", "s", "Median and 95th percentile by the engine's histogram.",
     [*quantile("vllm:time_to_first_token_seconds", 0.5), *quantile("vllm:time_to_first_token_seconds", 0.95)]),
    ("End to end", "s", "Arrival to last token, 95th percentile.",
     quantile("vllm:e2e_request_latency_seconds", 0.95)),
    ("Preemptions", "ops", "Requests put back and computed again; not a crash.", rate("vllm:num_preemptions_total")),
    ("Queue time", "s", "Mean wait before a request is first scheduled; no wait after a preemption is in it.",
     mean("vllm:request_queue_time_seconds")),
    ("Requests running and waiting", "short", "If waiting grows as preemptions fall, the delay only moved.",
     [*both("sum(vllm:num_requests_runningSELECTOR)", "running"),
      *both("sum(vllm:num_requests_waitingSELECTOR)", "waiting")]),
    ("KV cache in use", "percentunit", "Share of the GPU's blocks.", both("max(vllm:kv_cache_usage_percSELECTOR)")),
    ("Prompt tokens by source", "short", "Computed, from the GPU cache, from the tier; tokens a second.",
     [*rate("vllm:prompt_tokens_by_source_total", "computed", 'source="local_compute"'),
      *rate("vllm:prompt_tokens_by_source_total", "GPU cache", 'source="local_cache_hit"'),
      *rate("vllm:prompt_tokens_by_source_total", "tier", 'source="external_kv_transfer"')]),
    ("Tier: bytes loaded and stored", "Bps", "Stores without loads: nothing comes back. vLLM 0.24 and newer.",
     [*rate("vllm:kv_offload_load_bytes_total", "loaded"), *rate("vllm:kv_offload_store_bytes_total", "stored")]),
    ("Gap between tokens", "s", "95th percentile.", quantile("vllm:inter_token_latency_seconds", 0.95)),
    ("Tokens a second", "short", "Output tokens.", rate("vllm:generation_tokens_total")),
    ("Requests ended", "ops", "By reason; abort and error belong to nobody's service.",
     [(f'sum by (finished_reason) (rate(vllm:request_success_total{selector}[$__rate_interval]))',
       f"{name} {{{{finished_reason}}}}") for name, selector in (("control", CONTROL), ("variant", VARIANT))]),
    ("Limit asked for and tokens given", "short", "Mean max_tokens and mean answer of a request.",
     [*((expression, f"{name} asked") for expression, name in mean("vllm:request_params_max_tokens")),
      *((expression, f"{name} given") for expression, name in mean("vllm:request_generation_tokens"))]),
]  # fmt: skip

PRIMARY = 'protocol="$protocol", host=~"$host", role="primary"'
GUARD = PRIMARY.replace("primary", "guard")
HOSTS_RATIO, HOSTS_DIFFERENCE = (
    f'kvtrial_effect{{protocol="$protocol", host!="all", role="primary", scale="{scale}"}}'
    for scale in ("ratio", "difference")
)
HISTORY: list[tuple[str, str, str, list[Query]]] = [
    ("Primary effect", "short", "Arm / against, or the difference; below 1 (or 0) the arm's value is lower.",
     [(f"kvtrial_effect{{{PRIMARY}}}", "{{host}}: {{arm}} / {{against}}, {{phase}}")]),
    ("Interval of the primary effect", "short", "Wholly beyond the margin: better or worse.",
     [(f"kvtrial_effect_ci_low{{{PRIMARY}}}", "{{host}} low"),
      (f"kvtrial_effect_ci_high{{{PRIMARY}}}", "{{host}} high")]),
    ("Guards, as ratios", "short", "Arm / against; none of them may be worse.",
     [(f'kvtrial_effect{{{GUARD}, scale="ratio"}}', "{{host}}: {{metric}}, {{phase}}")]),
    ("Guards, in bytes", "bytes", "Arm - against; none of them may be worse.",
     [(f'kvtrial_effect{{{GUARD}, scale="difference", metric=~".*_bytes"}}', "{{host}}: {{metric}}, {{phase}}")]),
    ("Guards, other differences", "short", "Arm - against, in the metric's unit; none of them may be worse.",
     [(f'kvtrial_effect{{{GUARD}, scale="difference", metric!~".*_bytes"}}', "{{host}}: {{metric}}, {{phase}}")]),
    ("Time to first token, difference", "s", "Of the primary, arm - against, median of the pairs; below 0 is sooner.",
     [(f"kvtrial_delta_ttft_seconds{{{PRIMARY}}}", "{{host}}: {{arm}} / {{against}}, {{phase}}")]),
    ("Break-even hit share", "percentunit", "Share of requests that must return to pay; only where it is shown.",
     [('kvtrial_break_even_hit_share{protocol="$protocol"}',
       "{{how}}: {{arm}} / {{against}}, {{prefix_tokens}} tokens")]),
    ("Pairs", "short", "Pairs that the primary comparison rests on.",
     [(f"kvtrial_pairs{{{PRIMARY}}}", "{{host}}: {{arm}} / {{against}}, {{phase}}")]),
    ("p of the primary comparison", "short", "Exact two-sided test over the pairs.",
     [(f"kvtrial_p_value{{{PRIMARY}}}", "{{host}}: {{arm}} / {{against}}, {{phase}}")]),
    ("Hosts that stand apart", "short",
     "Spread of the hosts' primary effects at a time: largest / smallest of ratios, largest - smallest of differences.",
     [(f'max by (metric) ({HOSTS_RATIO}) / min by (metric) ({HOSTS_RATIO})', "{{metric}}: largest / smallest"),
      (f'max by (metric) ({HOSTS_DIFFERENCE}) - min by (metric) ({HOSTS_DIFFERENCE})',
       "{{metric}}: largest - smallest")]),
    ("Gates that failed", "short", "Any above 0 makes the verdict INVALID there.",
     [('count by (gate) (kvtrial_gate_passed{protocol="$protocol", host=~"$host"} == 0)', "{{gate}}")]),
    ("Runs", "short", "Planned, valid, dropped, engine faults.",
     [('sum by (state) (kvtrial_runs{protocol="$protocol", host=~"$host"})', "{{state}}")]),
    ("Verdicts", "short", "One line a word; 1 while the newest campaign says so.",
     [('max by (host, verdict) (kvtrial_verdict_info{protocol="$protocol", host=~"$host"})', "{{host}}: {{verdict}}")]),
    ("Alarms", "short", "Changes for the worse among the newest nights, by kvtrial history --textfile.",
     [('kvtrial_history_alarms{protocol="$protocol", host=~"$host|all"}', "{{host}}")]),
    ("What alarms say", "short", "Level since the change over the level before, of every alarm.",
     [('kvtrial_history_alarm_ratio{protocol="$protocol", host=~"$host|all"}',
       "{{host}}: {{metric}}, {{phase}}, {{kind}} {{arm}}")]),
    ("Noise between servers of one configuration", "percentunit", "SD of the log ratio of an A/A pair; any protocol's.",
     [('kvtrial_history_noise_sd{host=~"$host"}', "{{host}}: {{metric}}, {{phase}} ({{protocol}})")]),
    ("Nights in the history", "short", "A night that is missing stands still here.",
     [("kvtrial_history_nights", "nights")]),
]  # fmt: skip


def panel(number: int, title: str, unit: str, description: str, queries: list[Query]) -> dict[str, Any]:
    """A panel of lines, two beside each other."""
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend,
             "editorMode": "code", "range": True}
            for index, (expression, legend) in enumerate(queries)
        ],
        "fieldConfig": {
            "defaults": {
                "unit": unit,
                "color": {"mode": "palette-classic"},
                "custom": {"drawStyle": "line", "lineWidth": 2, "fillOpacity": 0, "showPoints": "auto",
                           "spanNulls": False},
            },
            "overrides": [
                {"matcher": {"id": "byRegexp", "options": f"/^{arm}/"},
                 "properties": [{"id": "custom.lineStyle", "value": {"fill": fill, "dash": dash}}]}
                for arm, fill, dash in (("control", "dash", [8, 6]), ("variant", "solid", [0, 0]))
            ],
        },
        "options": {
            "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }  # fmt: skip


def variable(name: str, label: str, metric: str, wanted: str, *, many: bool = False) -> dict[str, Any]:
    """A choice that Prometheus answers."""
    query = f"label_values({metric}, {wanted})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 1,
        "multi": many,
        "includeAll": many,
    }


def dashboard(
    uid: str, title: str, description: str, panels: list[dict[str, Any]], variables: list[dict[str, Any]], since: str
) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["kvtrial", "vllm"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "time": {"from": since, "to": "now"},
        "refresh": "30s" if since == "now-1h" else "",
        "templating": {"list": [source, *variables]},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def dashboards() -> dict[str, dict[str, Any]]:
    """File name → dashboard."""
    running = "vllm:num_requests_running"
    return {
        "engines.json": dashboard(
            "kvtrial-engines",
            "kvtrial: two vLLM servers, control and variant",
            "Both arms side by side while they serve. Choose the two instances above; dashed is the control.",
            [panel(number, *what) for number, what in enumerate(ENGINES)],
            [variable(name, name.capitalize(), running, "instance") for name in ("control", "variant")],
            "now-1h",
        ),
        "history.json": dashboard(
            "kvtrial-history",
            "kvtrial: verdicts over time",
            "What metrics.prom of the campaigns left with node_exporter's textfile collector; host=all is the fleet.",
            [panel(number, *what) for number, what in enumerate(HISTORY)],
            [
                variable("protocol", "Protocol", "kvtrial_verdict_info", "protocol"),
                variable("host", "Host", 'kvtrial_verdict_info{protocol="$protocol"}', "host", many=True),
            ],
            "now-90d",
        ),
    }


def text_of(made: dict[str, Any]) -> str:
    """A dashboard as it is written."""
    return json.dumps(made, indent=2) + "\n"


if __name__ == "__main__":
    for name, made in dashboards().items():
        (FOLDER / name).write_text(text_of(made), encoding="utf-8")
