"""Workloads in a plan: what contradicts itself is refused, a ladder becomes phases, needs are those of the requests."""

import math
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from kvtrial.analysis.workingset import Held, held_at_once, request_blocks, run_needs
from kvtrial.host.workload import phase_requests
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import LengthsPlan, MixPlan, PoissonPlan
from kvtrial.record.protocol import Phase, Workload
from kvtrial.record.trace import TraceLine
from test_plan import request

BASE = {
    "schema_version": "1.0",
    "name": "mine",
    "extends": "offload_return",
    "workloads": {
        "half": {"kind": "mix", "returning": "target", "fresh": "miss", "hit_share_percent": 50, "requests": 8},
        "drawn": {
            "kind": "lengths",
            "requests": 12,
            "prompt_tokens": {"kind": "lognormal", "median": 200, "sigma": 0.5, "least": 50, "most": "$prompt_tokens"},
            "output_tokens": {"kind": "choice", "values": [2, 4], "weights": [3, 1]},
            "shared_prefix_tokens": 32,
        },
        "talks": {
            "kind": "conversations",
            "conversations": 3,
            "turns": {"kind": "uniform", "least": 2, "most": 3},
            "question_tokens": 40,
            "answer_tokens": "$output_tokens",
            "pause_seconds": 0.5,
        },
    },
    "phases": [
        {"name": "populate", "block": "r", "prompts": "target", "salt": "r", "max_tokens": 2},
        {"name": "pressure", "block": "r", "prompts": "pressure", "salt": "r", "max_tokens": 1},
        {"name": "mixed", "block": "r", "workload": "half", "salt": "r", "max_tokens": 4,
         "arrivals": {"kind": "poisson", "rate_per_minute": 120}},
        {"name": "drawn", "block": "d", "workload": "drawn", "salt": "d", "concurrency": 3},
        {"name": "talks", "block": "t", "workload": "talks", "salt": "t"},
        {"name": "ladder", "block": "l", "prompts": "miss", "salt": "l", "max_tokens": 2, "concurrency": [1, 4]},
    ],
    "comparisons": [{"arm": "offload", "against": "control", "phase": "ladder_4", "metric": "ttft_median_seconds",
                     "role": "primary"}],
    "alternate_blocks": [],
    "break_even": {},
    "gates": {"prefix_evicted": None, "treatment_delivered": None, "noload_respected": None, "answers_equal": None},
}  # fmt: skip


def changed(path=(), value=None, **top):
    """BASE with the value at `path` replaced."""

    def put(at, steps):
        if not steps:
            return value
        if isinstance(at, list):
            return [put(item, steps[1:]) if i == steps[0] else item for i, item in enumerate(at)]
        return {**at, steps[0]: put(at.get(steps[0]), steps[1:])}

    return {**put(BASE, list(path)), **top}


def plan_of(tmp_path, declared=BASE, **changes):
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(declared))
    checked = read_request(request(protocol=str(tmp_path / "mine.yml"), **changes))
    return make_plan(checked, requested_protocol(checked))


def phases_of(plan, run=0):
    return {phase.name: phase for phase in plan.hosts[0].runs[run].phases}


def test_a_ladder_becomes_a_phase_for_each_concurrency_each_with_a_salt_of_its_own(tmp_path):
    phases = phases_of(plan_of(tmp_path))
    assert [name for name in phases if name.startswith("ladder")] == ["ladder_1", "ladder_4"]
    assert (phases["ladder_1"].concurrency, phases["ladder_4"].concurrency) == (1, 4)
    assert (phases["ladder_1"].salt, phases["ladder_4"].salt) == ("kvtrial.p1.l_1", "kvtrial.p1.l_4")


def test_every_pair_and_host_sends_new_prompts_of_the_same_lengths_and_a_pair_s_arms_the_same(tmp_path):
    host = request()["hosts"]["h1"]
    plan = plan_of(tmp_path, hosts={"h1": host, "h2": host})
    runs = [run for part in plan.hosts for run in part.runs]
    sent = [[list(phase_requests(phase, Path())) for phase in run.phases if phase.workload is not None] for run in runs]
    assert sent[0] == sent[1]
    for other in (sent[2], sent[len(plan.hosts[0].runs)]):
        for mine, theirs in zip(sent[0], other, strict=True):
            assert [len(r.prompt_token_ids) for r in mine] == [len(r.prompt_token_ids) for r in theirs]
            assert [r.max_tokens for r in mine] == [r.max_tokens for r in theirs]
            assert not {tuple(r.prompt_token_ids) for r in mine} & {tuple(r.prompt_token_ids) for r in theirs}


def test_a_plan_states_workloads_and_arrivals(tmp_path):
    phases = phases_of(plan_of(tmp_path))
    assert isinstance(phases["mixed"].workload, MixPlan)
    assert phases["mixed"].workload.returning == phases["populate"].prompts
    assert isinstance(phases["mixed"].arrivals, PoissonPlan) and phases["mixed"].arrivals.rate_per_second == 2.0
    drawn = phases["drawn"].workload
    assert isinstance(drawn, LengthsPlan) and drawn.block_tokens == 32 and drawn.prompt_tokens.most == 528
    assert phases["populate"].arrivals is None and phases["populate"].workload is None


REFUSED = [
    (("workloads", "half", "hit_share_percent"), 101, ["workload half: hit_share_percent=101", "0 to 100"]),
    (("workloads", "half", "requests"), 40, ["50 % of 40 requests return", "20 prompts of target, which has 8"]),
    (("workloads", "half", "fresh"), "mis", ["prompt set", "mis", "Did you mean miss"]),
    (("workloads", "half", "kind"), "mixx", ["mixx", "README"]),
    (("workloads", "drawn", "requests"), 1_000_001, ["requests=1000001", "1 to 1000000"]),
    (("workloads", "drawn", "requests"), "many", ["requests=many", "whole number"]),
    (("workloads", "drawn", "shared_prefix_tokens"), 50, ["prompts of 50 tokens can't begin with 50 shared"]),
    (("workloads", "drawn", "prompt_tokens", "least"), 600, ["prompt_tokens goes from 600 to 528"]),
    (("workloads", "drawn", "prompt_tokens", "sigma"), 0, ["sigma 0"]),
    (("workloads", "drawn", "prompt_tokens", "median"), 0, ["median 0"]),
    (("workloads", "drawn", "prompt_tokens", "median"), 5_000_000, ["nearly nothing", "from 50 to 528"]),
    (("workloads", "drawn", "prompt_tokens"), 0, ["prompt_tokens=0", "from 1"]),
    (("workloads", "drawn", "output_tokens", "weights"), [1], ["2 values by 1 weights"]),
    (("workloads", "drawn", "output_tokens", "weights"), [1, -1], ["[1.0, -1.0]", "above 0"]),
    (("workloads", "drawn", "output_tokens", "values"), [], ["0 values"]),
    (("workloads", "talks", "pause_seconds"), -1, ["pause_seconds=-1"]),
    (("workloads", "talks", "turns", "most"), 2000, ["turns.most=2000", "1 to 1000"]),
    (("workloads", "talks", "question_tokens"), "$nope", ['size "nope"']),
    (("phases", 0, "max_tokens"), "many", ["max_tokens='many'", "whole number"]),
    (("phases", 2, "arrivals", "rate_per_minute"), 0, ["phase mixed: arrivals.rate_per_minute=0"]),
    (("phases", 2, "arrivals", "rate_per_second"), 1, ["has 2 rates"]),
    (("phases", 2, "arrivals"), {"kind": "constant"}, ["has 0 rates"]),
    (("phases", 2, "arrivals"), {"kind": "recorded"}, ["kind trace"]),
    (("phases", 2, "arrivals"), {"kind": "bursty"}, ["bursty"]),
    (("phases", 2, "salt"), "elsewhere", ["returns to prompts of target in salt elsewhere", "no phase before it"]),
    (("phases", 3, "repeat"), 2, ["take or repeat"]),
    (("phases", 3, "max_tokens"), 2, ["leave it out"]),
    (("phases", 3, "workload"), "drwn", ["Did you mean drawn"]),
    (("phases", 5, "concurrency"), [1, 1], ["[1, 1]", "no ladder"]),
    (("phases", 5, "concurrency"), [], ["no ladder"]),
    (("phases", 5, "arrivals"), {"kind": "constant", "rate_per_second": 1}, ["ladder of concurrencies and arrivals"]),
    (("comparisons", 0, "phase"), "ladder", ["ladder", "ladder_1"]),
]


@pytest.mark.parametrize(
    ("path", "value", "named"), REFUSED, ids=[f"{'.'.join(map(str, p))}={v}" for p, v, _ in REFUSED]
)
def test_a_workload_that_cannot_be_run_is_refused_in_a_sentence(tmp_path, path, value, named):
    with pytest.raises(UnusableInput) as refused:
        plan_of(tmp_path, changed(path, value))
    sentence = str(refused.value)
    assert "\n" not in sentence
    for part in named:
        assert part in sentence, sentence


def test_the_limit_that_did_nothing_is_refused():
    checked = read_request(request(limits={"foreign_cpu_share_max": 0.5}))
    with pytest.raises(UnusableInput, match="foreign_cpu_share_max is not known"):
        make_plan(checked, requested_protocol(checked))


def test_an_open_loop_lasts_at_least_until_its_last_request_is_due(tmp_path):
    slow = changed(("phases", 2, "arrivals"), {"kind": "constant", "rate_per_minute": 6})
    fast = changed(("phases", 2, "arrivals"), {"kind": "constant", "rate_per_minute": 60_000})
    seconds = [plan_of(tmp_path, declared).estimates["h1"].seconds for declared in (slow, fast)]
    # Twelve runs, in each the eighth request is due after 70 s, of which its tokens take a few.
    assert 12 * 60 < seconds[0] - seconds[1] < 12 * 70


def test_a_conversation_that_outgrows_the_engine_is_refused(tmp_path):
    longer = changed(("workloads", "talks", "turns"), {"kind": "uniform", "least": 60, "most": 61})
    with pytest.raises(
        UnusableInput, match=r"a request of talks has \d+ tokens with its answer, --max-model-len is 2048"
    ):
        plan_of(tmp_path, longer)


def test_pressure_by_a_workload_is_counted_by_its_blocks(tmp_path):
    weak = changed(("phases", 1), {"name": "pressure", "block": "r", "workload": "drawn", "salt": "r"})
    with pytest.raises(UnusableInput, match=r"pressure takes \d+ blocks, the GPU KV cache holds 96"):
        plan_of(tmp_path, weak)


def test_needs_are_the_sums_over_the_requests(tmp_path):
    phases = phases_of(plan_of(tmp_path))
    needs = run_needs(list(phases.values()), 32)
    for name, phase in phases.items():
        requests = list(phase_requests(phase, Path()))
        lengths = [(len(r.prompt_token_ids), r.max_tokens) for r in requests]
        need = needs.phases[name]
        assert need.requests == len(requests)
        assert need.prompt_tokens == sum(prompt for prompt, _ in lengths)
        assert need.blocks == sum(request_blocks(*both, 32) for both in lengths)
        assert need.longest_tokens == max(map(sum, lengths))


def test_a_shared_beginning_and_the_turns_of_a_conversation_are_stored_once(tmp_path):
    phases = phases_of(plan_of(tmp_path))
    for name in ("drawn", "talks"):
        # What is really stored: every distinct chunk of token ids with all that comes before it.
        chunks = {
            tuple(r.prompt_token_ids[: 16 * (number + 1)])
            for r in phase_requests(phases[name], Path())
            for number in range(len(r.prompt_token_ids) // 16)
        }
        assert run_needs([phases[name]], 32).held.chunks(16, "run") == len(chunks)


keys = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5), st.integers(0, 90)), max_size=20)


@given(stored=keys, scope=st.sampled_from(["run", "block"]))
@settings(max_examples=200, deadline=None)
def test_a_tier_holds_each_key_once_at_its_most(stored, scope):
    most = {}
    for _, key, tokens in stored:
        most[key] = max(tokens, most.get(key, 0))
    crossing = len({(block, key) for block, key, _ in stored}) > len(most)
    by_block = {block: sum(most[k] for k in {key for b, key, _ in stored if b == block}) for block, _, _ in stored}
    expected = sum(most.values()) if scope == "run" or crossing else max(by_block.values(), default=0)
    assert held_at_once(stored, scope) == expected
    held = Held()
    for block, key, tokens in stored:
        held.add(block, key, tokens)
    assert held.chunks(7, "run") == sum(tokens // 7 for tokens in most.values())
    assert math.ceil(expected / 7) >= held.chunks(7, scope)


def test_the_examples_of_the_manual_are_what_it_says_they_are():
    text = (Path(__file__).parents[3] / "playbooks" / "protocols" / "README.md").read_text()
    blocks = [yaml.safe_load(block.split("```")[0]) for block in text.split("```yaml")[1:]]
    workloads = [w for b in blocks if isinstance(b, dict) for w in b.get("workloads", {}).values()]
    phases = [p for b in blocks for p in (b.get("phases", []) if isinstance(b, dict) else b)]
    assert {type(msgspec.convert(w, type=Workload)).__name__ for w in workloads} == {
        "Mix", "Lengths", "Conversations", "Trace"
    }  # fmt: skip
    kinds = {type(msgspec.convert(p, type=Phase).arrivals).__name__ for p in phases}
    assert kinds == {"UnsetType", "Constant", "Poisson", "Recorded"}
    lines = text.split("```json")[1].split("```")[0].strip().splitlines()
    assert [msgspec.json.decode(line, type=TraceLine).time for line in lines] == [0.0, 0.35, 1.2]
