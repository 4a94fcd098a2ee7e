"""Oddities of the exposition format: survived, and said."""

import json
import re

import pytest
from kvtrial.analysis.cli import main
from kvtrial.record.errors import UnusableInput
from planted import classes, page, pages, seen

BEFORE = page(connector=True, running=3, finished=10, prompt=1e4, generated=1e3)
AFTER = page(connector=True, running=3, finished=20, prompt=2e4, generated=2e3, preemptions=4, store=1e9, asked=1e4)


def changed(old: str, new: str, text: str = AFTER) -> str:
    assert old in text
    return text.replace(old, new)


def without(prefix: str, text: str = AFTER) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if prefix not in line)


OF = '{engine="0",model_name="some-model"}'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (changed(f"kv_cache_usage_perc{OF} 0.1", f"kv_cache_usage_perc{OF} NaN"), "nan"),
        (changed(f"queue_time_seconds_sum{OF} 0.0", f"queue_time_seconds_sum{OF} +Inf"), "inf"),
        (changed("vllm:num_preemptions_total", "vllm:num_preemptions"), "without _total"),
        (AFTER + "vllm:num_preemptions_total{engine=0 broken\n", "can't be read"),
        (AFTER + f"vllm:num_requests_running{OF} 3.0\n", "twice"),
    ],
    ids=["NaN", "+Inf", "no _total", "a broken line", "a series twice"],
)
def test_an_oddity_that_costs_a_value_names_the_answer(text: str, says: str):
    answer = seen(BEFORE, text)
    assert answer.class_ == "parsed_with_caveats"
    assert says in answer.findings[0].reason
    assert answer.verdict == "report"


def test_a_value_that_is_not_a_number_is_unknown_and_not_zero():
    broken = changed(
        'vllm:num_preemptions_total{engine="0",model_name="some-model"} 4',
        'vllm:num_preemptions_total{engine="0",model_name="some-model"} NaN',
    )
    answer = seen(BEFORE, broken)
    assert "preemptions unknown" in answer.findings[0].reason
    assert "preemption_unknown" in classes(answer)
    assert "0 preemptions" not in answer.findings[0].reason


def test_a_store_that_is_not_a_number_is_no_store_of_0():
    line = 'vllm:kv_offload_store_bytes_total{engine="0",model_name="some-model"} '
    broken = changed(f"{line}{1e9}", f"{line}NaN")
    reason = seen(BEFORE, broken).findings[0].reason
    assert "load 0 B, store unknown" in reason and "store 0 B" not in reason


def test_a_value_that_is_no_number_is_said_also_where_nothing_reads_it():
    odd = AFTER + '# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{max_lora="0"} NaN\n'
    answer = seen(BEFORE, odd)
    assert answer.class_ == "parsed_with_caveats"
    assert "vllm:lora_requests_info is nan" in answer.findings[0].reason


def test_counters_without_total_and_without_a_type_line_keep_their_numbers():
    bare = [
        without("TYPE vllm:num_preemptions", text.replace("num_preemptions_total", "num_preemptions"))
        for text in (BEFORE, AFTER)
    ]
    assert seen(*bare).findings[0].numbers["delta"] == 4


def test_counters_without_total_keep_their_numbers():
    bare = AFTER.replace("vllm:num_preemptions_total", "vllm:num_preemptions")
    first = BEFORE.replace("vllm:num_preemptions_total", "vllm:num_preemptions")
    assert seen(first, bare).findings[0].numbers["delta"] == 4


@pytest.mark.parametrize(
    "text",
    [
        AFTER + "# EOF\n",
        AFTER.replace("\n", "\r\n"),
        "\ufeff" + AFTER,
        "\n".join(f"{line} 1790000100000" if line.startswith("vllm:") else line for line in AFTER.splitlines()) + "\n",
        AFTER.rstrip("\n") + ' # {trace_id="x"} 1.0\n',
    ],
    ids=["OpenMetrics end", "CRLF", "byte order mark", "timestamps", "exemplar"],
)
def test_an_oddity_that_costs_nothing_is_said_and_does_not_name_the_answer(text: str):
    answer = seen(BEFORE, text)
    assert answer.class_ == seen(BEFORE, AFTER).class_
    assert answer.findings[0].numbers == seen(BEFORE, AFTER).findings[0].numbers


def test_a_family_that_is_declared_without_a_sample_is_zero_and_one_that_is_not_there_is_not():
    declared = page(connector=True, finished=10, prompt=1e4)
    assert pages(declared).main.last.values["load_bytes"] == 0.0
    assert pages(page(finished=10)).main.last.values["load_bytes"] is None


def test_the_created_family_of_a_counter_is_no_counter():
    assert seen(BEFORE, AFTER).findings[0].numbers["delta"] == 4


def both(first: str, second: str) -> str:
    """Two engines or models on the page of one process."""
    return first + without("process_start_time_seconds", second)


def test_what_a_page_lacks_is_named_beside_what_it_declares_without_a_sample():
    odd = changed(f"kv_cache_usage_perc{OF} 0.1", f"kv_cache_usage_perc{OF} NaN")
    said = seen(BEFORE, without("external_prefix_cache_hits", odd)).findings[0].reason
    assert "Not exported here, which is not zero either: external_prefix_cache_hits_tokens" in said
    assert "Declared without a sample, which is 0: load_bytes" in said
    assert "Unknown, which is not zero: kv_cache_usage_share" in said


def test_several_engines_are_summed_and_their_gauges_kept_apart():
    two = [
        both(
            page(engine="0", finished=n, preemptions=n, usage=0.2, running=1, prompt=n),
            page(engine="1", finished=n, preemptions=3 * n, usage=0.9, waiting=5, prompt=n),
        )
        for n in (1, 2)
    ]
    answer = seen(*two)
    assert answer.class_ == "parsed_per_model_and_engine"
    numbers = answer.findings[0].numbers
    assert numbers["preempt"] == {"0": 1, "1": 3}
    assert numbers["kv_usage"] == {"0": 0.2, "1": 0.9}
    assert (numbers["waiting"], numbers["finished"]) == (5, 2)


def test_preemptions_of_one_engine_of_several_are_not_those_of_all():
    two = [
        both(page(engine="0", preemptions=3, usage=0.2), page(engine="1", preemptions=count, usage=0.99))
        for count in (5, 90)
    ]
    answer = seen(*two)
    assert answer.class_ == "preemption_concentrated"
    assert answer.findings[0].numbers["engine"] == "1"


def test_several_models_are_never_added_up():
    two = [both(page(model="a", preemptions=5, prompt=9e9), page(model="b", preemptions=n)) for n in (100, 300)]
    answer = seen(*two)
    assert answer.class_ == "parsed_per_model_and_engine"
    assert answer.findings[0].numbers["model"] == "a"
    assert answer.findings[0].numbers["delta"] == 0
    assert next(f for f in answer.findings if f.about == "b").numbers["delta"] == 200


def test_one_engine_restarted_among_several_is_a_restart():
    two = [both(page(engine="0", finished=n), page(engine="1", finished=n)) for n in (1, 2)]
    again = two[1].replace(
        'vllm:num_preemptions_created{engine="1",model_name="some-model"} 1790000005.0',
        'vllm:num_preemptions_created{engine="1",model_name="some-model"} 1790009005.0',
    )
    assert seen(*two).class_ != "counter_reset"
    assert seen(two[0], again).class_ == "counter_reset"


def test_a_page_cut_inside_a_line_is_refused_whole():
    with pytest.raises(UnusableInput, match="Nothing of it is used"):
        pages(BEFORE, AFTER[: AFTER.index("vllm:request_success_total{") + 30])


def test_a_page_of_fifty_megabytes_is_read():
    filler = "".join(
        f'vllm:request_prompt_tokens_bucket{{engine="0",le="{n}.0",model_name="some-model"}} {n}.0\n'
        for n in range(1000)
    )
    large = AFTER + filler * (50 * 2**20 // len(filler) + 1)
    assert len(large) > 50 * 2**20
    assert seen(BEFORE, large).findings[0].numbers["delta"] == 4


def test_a_version_newer_than_those_read_is_read_by_what_it_exports_and_says_so():
    answer = seen(BEFORE, AFTER, version="0.47.0")
    assert answer.findings[0].numbers["delta"] == 4
    assert any("0.47.0 is newer than" in note for note in answer.notes)
    assert seen(BEFORE, AFTER, version="0.26.0").notes == []


@pytest.mark.parametrize(("stated", "made"), [("0.11.2", "0.26.0"), ("0.24.0", "0.32.0"), ("0.32.0", "0.22.0")])
def test_a_version_that_the_page_contradicts_is_said(stated: str, made: str):
    pair = page(made, finished=100.0), page(made, finished=200.0)
    (note,) = seen(*pair, version=stated).notes
    assert note.startswith(f"vLLM {stated} was stated, and the page is of ") and "may be wrong" in note
    assert seen(*pair, version=made).notes == [] == seen(*pair).notes


@pytest.mark.parametrize(
    "arguments", [["--metrics", "none.prom"], ["--log", "none.log"], ["--url", "not an address:x"], []]
)
def test_what_can_not_be_read_is_one_sentence_and_status_2(arguments: list[str], tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["observe", *arguments, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["verdict"] == "error" and len(answer["findings"]) == 1
    assert main(["observe", *arguments]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_page_that_is_no_text_is_refused(tmp_path, capsys):
    (tmp_path / "page.prom.gz").write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    assert main(["observe", "--metrics", str(tmp_path / "page.prom.gz"), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["class"] == "not_vllm_metrics"


def test_a_counter_with_two_values_is_unknown_and_neither_is_used():
    twice = page(preemptions=0, finished=200.0) + 'vllm:num_preemptions_total{engine="0",model_name="some-model"} 7\n'
    answer = seen(page(finished=100.0), twice)
    assert not any(one.class_.startswith("preemption_shape") for one in answer.findings)
    assert "preemption_unknown" in [one.class_ for one in answer.findings]
    assert any("0 and 7): unknown" in one.reason for one in answer.findings)


LOADS = 'vllm:kv_offload_load_bytes_total{engine="0",model_name="some-model"}'


def loading(step: int, **more: float) -> dict[str, float]:
    return {"running": 4, "finished": 50.0 * step, "prompt": 5e4 * step, "generated": 9e3 * step, "store": 2e9 * step,
            **more}  # fmt: skip


@pytest.mark.parametrize("value", ["NaN", "+Inf", "cut"])
def test_loads_that_can_not_be_read_are_not_explained_as_none(value):
    texts = [page(connector=True, **loading(n, load=1e9 * n, external=8e3 * n)) for n in (1, 2)]
    spoilt = r"\1 cut " if value == "cut" else rf"\1 {value}"
    read = seen(*[re.sub(f"({re.escape(LOADS)}) .*", spoilt, text) for text in texts])
    assert not {"no_reuse_in_workload", "gpu_cache_answered", "tier_idle"} & set(classes(read))
    found = {one.class_: one for one in read.findings}["tier_loads_unknown"]
    assert found.confidence == "unknown"
    assert "load unknown" in found.reason
    assert "the tier found 8,000 tokens" in found.reason


def test_hits_of_the_tier_without_a_load_are_no_lack_of_reuse():
    read = seen(*[page(connector=True, **loading(n, external=8e3 * n, asked=9e3 * n)) for n in (1, 2)])
    assert classes(read)[0] == "tier_loads_unknown"
    assert "a load that fails leaves its hit counted" in read.findings[0].reason
    assert "no_reuse_in_workload" not in classes(read)
    none = seen(*[page(connector=True, **loading(n, asked=9e3 * n)) for n in (1, 2)])
    assert classes(none)[0] == "no_reuse_in_workload"


def test_gpu_hits_that_are_not_exported_are_not_none():
    texts = [page(connector=True, **loading(n, asked=9e3 * n)) for n in (1, 2)]
    bare = ["\n".join(line for line in text.splitlines() if "prefix_cache_hits" not in line
                      and "by_source" not in line) + "\n" for text in texts]  # fmt: skip
    read = seen(*bare)
    assert "no_reuse_in_workload" not in classes(read)
    assert "GPU prefix hits are missing or unreadable" in read.findings[0].reason


def test_preemptions_without_a_usage_gauge_infer_the_pressure():
    texts = [page(running=6, usage=0.9, finished=30.0 * n, prompt=1e4 * n, preemptions=9.0 * n) for n in range(5)]
    bare = ["\n".join(line for line in text.splitlines() if "kv_cache_usage" not in line) + "\n" for text in texts]
    found = seen(*bare).findings[0]
    assert (found.class_, found.confidence) == ("preemption_continuous", "inferred")
    assert "KV usage is not known" in found.reason
    assert seen(*texts).findings[0].confidence == "seen"
