"""offload_mix has three forms: a sweep of shares, one declared share, and the user's trace. What is given chooses."""

import json
from pathlib import Path

import pytest
from kvtrial.analysis.campaign import prepare
from kvtrial.analysis.inputs import read_request
from kvtrial.analysis.plan import make_plan, requested_protocol
from kvtrial.analysis.workloads import Traces
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import MixPlan, PoissonPlan
from trial import ROOT, request_for

GPU_SIZES = {
    "prompt_tokens": 4104, "suffix_tokens": 8, "output_tokens": 8, "pressure": 11, "misses": 6,
    "tier_bytes": 28 * 2**30, "arrivals_per_minute": 120,
}  # fmt: skip


def raw(tmp_path: Path, **changes):
    chosen = {name: changes.pop(name) for name in ("trace", "hit_share_percent", "arrivals_per_minute", "new_campaign")
              if name in changes}  # fmt: skip
    changes = {"protocol": "offload_mix", "sizes": {"prompt_tokens": 144, "arrivals_per_minute": 300}, **changes}
    return {**request_for(tmp_path, **changes), **chosen}


def chosen(tmp_path: Path, **changes):
    request = read_request(raw(tmp_path, **changes))
    return request, requested_protocol(request)


def phases(tmp_path: Path, **changes):
    request, protocol = chosen(tmp_path, **changes)
    return {phase.name: phase for phase in make_plan(request, protocol).hosts[0].runs[0].phases}


def refusal(tmp_path: Path, **changes) -> str:
    with pytest.raises(UnusableInput) as refused:
        phases(tmp_path, **changes)
    return str(refused.value)


def test_without_anything_the_share_is_swept(tmp_path):
    planned = phases(tmp_path)
    mixes = {name: phase.workload for name, phase in planned.items() if isinstance(phase.workload, MixPlan)}
    assert {name: mix.hit_share_percent for name, mix in mixes.items()} == {
        "mix_00": 0, "mix_25": 25, "mix_50": 50, "mix_75": 75, "mix_100": 100,
    }  # fmt: skip
    assert len({mix.fresh.seed for mix in mixes.values()} | {mix.returning.seed for mix in mixes.values()}) == 10
    assert len({planned[name].salt for name in mixes}) == 5
    assert {planned[name].arrivals.rate_per_second for name in mixes} == {5.0}


def test_a_hit_share_chooses_the_one_share(tmp_path):
    planned = phases(tmp_path, hit_share_percent=30, arrivals_per_minute=90)
    assert planned["mix"].workload.hit_share_percent == 30
    assert isinstance(planned["mix"].arrivals, PoissonPlan)
    assert planned["mix"].arrivals.rate_per_second == 1.5
    assert "mix_50" not in planned


def test_a_trace_chooses_the_replay(tmp_path):
    _, protocol = chosen(tmp_path, trace="my.jsonl")
    assert protocol.name == "offload_mix_trace"
    assert "kvtrial_trace" not in str(protocol)


def test_a_trace_is_replayed_at_its_own_times_or_at_the_rate_that_is_given(tmp_path):
    lines = [{"time": 0.5 * n, "prompt_tokens": 100 + n, "max_tokens": 4, "salt": f"tenant{n % 2}"} for n in range(6)]
    trace = tmp_path / "my.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    for rate, says in ((None, "recorded"), (120, "poisson")):
        prepared = prepare(raw(tmp_path, trace=str(trace), arrivals_per_minute=rate, new_campaign=True))
        host = json.loads(Path(prepared["plans"]["h1"]).read_text())
        phase = next(phase for phase in host["runs"][0]["phases"] if phase["name"] == "trace")
        assert phase["arrivals"]["kind"] == says
        assert phase["workload"]["requests"] == 6


def test_what_contradicts_itself_is_refused_in_a_sentence(tmp_path):
    assert "are both given" in refusal(tmp_path, trace="a.jsonl", hit_share_percent=10)
    assert "give a whole number from 0 to 100" in refusal(tmp_path, hit_share_percent=130)
    for rate in (0, -1, 10**9):
        said = refusal(tmp_path, arrivals_per_minute=rate)
        assert f"kvtrial_arrivals_per_minute={rate} is no rate; give a whole number from 1 to" in said
    said = refusal(tmp_path, protocol="offload_return", sizes={"prompt_tokens": 144}, arrivals_per_minute=60)
    assert "offload_return has no size arrivals_per_minute" in said
    assert "use -e protocol=offload_mix" in said


def test_a_trace_without_a_file_is_refused(tmp_path):
    with pytest.raises(UnusableInput, match="-e kvtrial_trace=PATH"):
        prepare({**raw(tmp_path, protocol="offload_mix_trace"), "dry_run": True})


@pytest.mark.parametrize("protocol", ["offload_mix", "offload_mix_share"])
def test_the_local_sizes_fit_the_local_engine(tmp_path, protocol):
    args = {"max-model-len": 2048, "block-size": 32, "num-gpu-blocks-override": 97}
    request = read_request({**raw(tmp_path, protocol=protocol, engine_args=args), "hosts": {}} | {
        "hosts": {"h1": {**raw(tmp_path, engine_args=args)["hosts"]["h1"], "sizes": {}}}
    })  # fmt: skip
    plan = make_plan(request, requested_protocol(request), Traces(Path(), {}))
    minutes = plan.estimates["h1"].seconds / 60
    assert 5 < minutes < 45


def test_the_container_inventorys_sizes_fit_its_gpu_blocks_and_tier(tmp_path):
    text = (ROOT / "inventories" / "gpu_container" / "group_vars" / "all" / "10-container.yml").read_text()
    for name, value in GPU_SIZES.items():
        assert name == "tier_bytes" or f"{name}: {value}\n" in text
    changes = {
        "backend": "cuda", "sizes": {"ram_tolerance_percent": 10, **GPU_SIZES}, "connector_extra_config": {},
        "engine_args": {"block-size": 16, "num-gpu-blocks-override": 2300, "max-model-len": 16640},
        "model": {"kv_bytes_per_token": 114688},
    }  # fmt: skip
    host = raw(tmp_path, **changes)
    host["hosts"]["h1"]["sizes"] = changes["sizes"]
    host["hosts"]["h1"]["connector_extra_config"] = {}
    request = read_request(host)
    assert make_plan(request, requested_protocol(request)).estimates["h1"].runs == 12


def test_a_trace_larger_than_the_tier_is_the_users_own(tmp_path):
    """The tier of the fixture holds 128 chunks of 64 tokens; here 200 prompts of 2 chunks, and at a block's edge."""
    lines = [{"time": 0.1 * number, "prompt_tokens": 128, "max_tokens": 4} for number in range(200)]
    trace = tmp_path / "large.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    prepared = prepare({**raw(tmp_path, trace=str(trace)), "dry_run": True})
    assert any("200 requests over 20 s" in line for line in prepared["announcement"])
