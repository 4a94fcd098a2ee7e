"""Pages of /metrics: real ones, odd ones, cut ones."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.record.errors import UnusableInput
from kvtrial.record.exposition import delta, metric_table, parse_page, read_models, read_page, refuse_cut_page

PAGES = Path(__file__).parents[2] / "fixtures" / "metrics"
ODD_MODEL = 'team "A", qwen{0.6b} \\ größe=klein 模型'


def text(name):
    return (PAGES / f"{name}.prom").read_text(encoding="utf-8")


def read(name, version, model=None):
    return read_page(parse_page(text(name)), version, model)


def test_a_page_of_0_32_with_offloading_gives_every_role_of_that_version():
    reading = read("vllm-0.32.0-cpu-after-offload", "0.32.0")
    assert reading.values["load_bytes"] == 27394048
    assert reading.values["store_bytes"] == 157286400
    assert reading.values["load_seconds"] == pytest.approx(0.05657234)
    assert reading.values["prompt_tokens_computed"] == 31712
    assert reading.values["prompt_tokens_local_hit"] == 10400
    assert reading.values["prompt_tokens_external"] == 5248
    assert reading.values["prompt_tokens_cached_host"] == 5248
    assert reading.values["preemptions"] == reading.values["request_preemptions_sum"] == 71
    assert reading.values["queue_seconds_count"] == 80
    assert reading.info["cache_config"]["num_gpu_blocks"] == "40"
    assert "offload_config" not in reading.info
    assert reading.model_name == "tiny"
    assert reading.whole
    assert reading.caveats == []
    assert {role for role, value in reading.values.items() if value is None} == {"offload_stores_skipped"}


def test_a_page_of_0_26_has_the_roles_of_its_version_and_no_others():
    reading = read("vllm-0.26.0-h200-8b-offload-after-return", "0.26.0")
    missing = {role for role, value in reading.values.items() if value is None}
    assert missing == {
        "offload_stores_skipped",
        "prompt_tokens_cached_device",
        "prompt_tokens_cached_host",
        "prompt_tokens_cached_disk",
        "prompt_tokens_cached_p2p",
        "prompt_tokens_cached_external_unspecified",
        "request_preemptions_sum",
        "request_preemptions_count",
        "requests_kv_fetch_waiting_to_start",
        "requests_kv_fetch_in_progress",
        "requests_kv_fetch_completed_waiting",
    }


def test_load_bytes_are_tokens_times_bytes_per_token_between_two_real_pages():
    change = delta(
        read("vllm-0.26.0-h200-8b-offload-before-return", "0.26.0"),
        read("vllm-0.26.0-h200-8b-offload-after-return", "0.26.0"),
    )
    assert change.monotone
    assert not change.restarted
    assert change.values["load_bytes"] == change.values["external_prefix_cache_hits_tokens"] * 147456
    assert change.values["prompt_tokens"] == sum(
        change.values[f"prompt_tokens_{source}"] for source in ("computed", "local_hit", "external")
    )
    assert "kv_cache_usage_share" not in change.values


def test_a_declared_family_without_a_sample_is_zero_and_an_absent_one_is_none():
    assert read("vllm-0.26.0-h200-8b-offload-start", "0.26.0").values["load_bytes"] == 0.0
    assert read("vllm-0.26.0-h200-8b-control-after-return", "0.26.0").values["load_bytes"] is None
    assert read("vllm-0.32.0-cpu-idle", "0.32.0").values["load_bytes"] is None


def test_the_labelled_family_counts_before_0_24_and_is_never_added_afterwards():
    page = parse_page(text("vllm-0.26.0-h200-8b-offload-after-return"))
    old, new = read_page(page, "0.20.2"), read_page(page, "0.26.0")
    assert old.values["load_bytes"] == new.values["load_bytes"] == 14155776000
    assert old.values["store_bytes"] == new.values["store_bytes"]
    assert read_page(page, None).values["load_bytes"] == 14155776000
    only_legacy = "\n".join(
        line for line in text("vllm-0.26.0-h200-8b-offload-after-return").split("\n") if "_load_bytes" not in line
    )
    assert read_page(parse_page(only_legacy), "0.26.0").values["load_bytes"] is None
    assert read_page(parse_page(only_legacy), "0.20.2").values["load_bytes"] == 14155776000


@pytest.mark.parametrize("after", ["after", "after_timestamps"])
def test_two_engines_and_two_models_are_kept_apart(after):
    before = read_models(parse_page(text("two-engines-two-models-before")), "0.26.0")
    later = read_models(parse_page(text(f"two-engines-two-models-{after}")), "0.26.0")
    assert set(later) == {ODD_MODEL, "second/model"}
    change = delta(before[ODD_MODEL], later[ODD_MODEL])
    assert change.values["preemptions"] == 9
    assert change.per_engine["preemptions"] == {"0": 2, "1": 7}
    assert change.per_engine["load_bytes"] == {"0": 367001600, "1": 734003200}
    assert change.values["external_prefix_cache_hits_tokens"] == 9600
    assert change.values["requests_finished_length"] == 112
    reading = later[ODD_MODEL]
    assert reading.values["requests_running"] == 13
    assert reading.values["requests_waiting"] == 12
    assert reading.per_engine["requests_waiting"] == {"0": 0, "1": 12}
    assert reading.values["kv_cache_usage_share"] == 0.97
    assert reading.per_engine["kv_cache_usage_share"] == {"0": 0.41, "1": 0.97}
    other = delta(before["second/model"], later["second/model"])
    assert other.values["preemptions"] == 0
    assert other.values["load_bytes"] is None


def test_several_models_are_never_added_up_unasked():
    page = parse_page(text("two-engines-two-models-after"))
    with pytest.raises(UnusableInput, match="2 models"):
        read_page(page, "0.26.0")
    with pytest.raises(UnusableInput, match="'third' is not on the page"):
        read_page(page, "0.26.0", "third")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("odd-html", "HTML .*login page of a proxy"),
        ("odd-empty", r"empty \(0 bytes\)"),
        ("odd-json", "an error object in JSON"),
        ("odd-other_server", "no vllm: family .*llamacpp"),
    ],
)
def test_what_is_no_metrics_page_of_vllm_is_refused_in_a_sentence(name, says):
    with pytest.raises(UnusableInput, match=says):
        parse_page(text(name))


def test_plain_garbage_is_refused():
    with pytest.raises(UnusableInput, match="not metrics text"):
        parse_page("502 Bad Gateway\nupstream went away\n")


def test_a_cut_page_makes_the_family_at_the_cut_unknown_and_says_so():
    page = parse_page(text("odd-truncated"))
    reading = read_page(page, "0.26.0")
    assert not reading.whole
    assert reading.values["preemptions"] is None
    assert reading.values["prompt_tokens"] is None
    assert reading.values["requests_running"] == 3
    assert "ends inside a line" in reading.caveats[0]
    with pytest.raises(UnusableInput, match="ends inside a line"):
        refuse_cut_page(page)


def test_a_number_at_the_very_end_may_have_lost_digits():
    page = parse_page(
        text("vllm-0.32.0-cpu-idle").split("# HELP vllm:generation_tokens_total")[0] + "vllm:generation_tokens_total 12"
    )
    assert read_page(page, "0.32.0").values["generation_tokens"] is None


def test_a_page_that_only_lost_its_last_newline_keeps_its_info_and_is_not_refused():
    page = parse_page(text("vllm-0.32.0-cpu-idle").rstrip("\n"))
    refuse_cut_page(page)
    assert read_page(page, "0.32.0").info["cache_config"]["block_size"] == "32"
    assert "does not end with a newline" in page.caveats[0]


@given(st.integers(min_value=0, max_value=len((PAGES / "odd-truncated.prom").read_bytes())))
def test_no_cut_turns_into_a_wrong_number(length):
    whole = read_page(parse_page(text("vllm-0.26.0-h200-8b-offload-start")), "0.26.0")
    try:
        page = parse_page(text("vllm-0.26.0-h200-8b-offload-start")[: length * 6])
    except UnusableInput:
        return
    cut = read_page(page, "0.26.0")
    assert all(value in (None, whole.values[role], 0.0) for role, value in cut.values.items())


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_unknown(value):
    page = parse_page(
        f'# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {value}\n'
    )
    reading = read_page(page, "0.32.0")
    assert reading.values["kv_cache_usage_share"] is None
    assert "treated as unknown" in reading.caveats[0]


def test_windows_line_ends_a_byte_order_mark_and_openmetrics_are_read():
    plain = 'vllm:num_preemptions_total{engine="0",model_name="m"} 7'
    assert (
        read_page(parse_page("\ufeff# TYPE vllm:num_preemptions_total counter\r\n" + plain + "\r\n"), "0.32").values[
            "preemptions"
        ]
        == 7
    )
    openmetrics = f'# TYPE vllm:num_preemptions counter\n{plain} # {{trace_id="a"}} 1.0\n# EOF\n'
    assert read_page(parse_page(openmetrics), "0.32").values["preemptions"] == 7


def test_counters_that_lost_their_total_on_the_way_are_read_with_a_caveat():
    page = parse_page('# TYPE vllm:num_preemptions counter\nvllm:num_preemptions{engine="0",model_name="m"} 7\n')
    assert read_page(page, "0.32").values["preemptions"] == 7
    assert "without _total" in page.caveats[0]


def test_an_unreadable_line_makes_its_family_unknown_and_leaves_the_rest():
    page = parse_page(
        'vllm:num_preemptions_total{engine="0" 7\nvllm:generation_tokens_total{engine="0",model_name="m"} 5\n'
    )
    reading = read_page(page, "0.32")
    assert reading.values["preemptions"] is None
    assert reading.values["generation_tokens"] == 5
    assert any("can't be read" in caveat for caveat in reading.caveats)


def test_a_restart_is_seen_by_the_start_time_and_voids_the_window():
    change = delta(read("restarted-before", "0.26.0"), read("restarted-after", "0.26.0"))
    assert change.restarted
    assert not change.monotone
    assert "load_bytes" in change.fell
    assert set(change.values.values()) == {None}


def test_a_fall_in_one_engine_is_seen_under_a_rising_sum():
    def page(first, second):
        return read_page(
            parse_page(
                "process_start_time_seconds 5\n"
                f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {first}\n'
                f'vllm:num_preemptions_total{{engine="1",model_name="m"}} {second}\n'
            ),
            "0.32",
        )

    change = delta(page(10, 10), page(3, 90))
    assert change.fell == ["preemptions"]
    assert not change.monotone
    assert change.values["preemptions"] is None
    assert delta(page(10, 10), page(10, 12)).values["preemptions"] == 2


def test_two_servers_on_a_federated_page_are_added_with_a_caveat():
    page = parse_page(
        'vllm:num_preemptions_total{engine="0",model_name="m",pod="a"} 3\n'
        'vllm:num_preemptions_total{engine="0",model_name="m",pod="b"} 4\n'
    )
    reading = read_page(page, "0.32")
    assert reading.values["preemptions"] == 7
    assert "differ in pod" in reading.caveats[0]


def test_a_version_that_was_not_read_leaves_a_caveat():
    assert "newer than" in read("vllm-0.32.0-cpu-idle", "0.40.0").caveats[0]


def test_every_role_of_the_method_is_there():
    roles = set(metric_table().values)
    assert {f"requests_finished_{reason}" for reason in ("stop", "length", "abort", "error", "repetition")} <= roles
    assert {
        f"{name}_seconds_{part}"
        for name in ("ttft", "itl", "e2e", "queue", "prefill", "decode")
        for part in ("sum", "count")
    } <= roles
