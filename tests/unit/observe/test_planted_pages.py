"""Each class on a page with that fault planted, and quiet on the page beside it."""

import msgspec
import pytest
from kvtrial.analysis.observe import observe
from kvtrial.analysis.observe.client import Client
from kvtrial.record.launch import ArmLaunch
from planted import STARTED, classes, launch, page, pages, seen

BUSY = {"running": 20.0, "finished": 100.0, "prompt": 100_000.0, "generated": 9_000.0}
LATER = {"running": 20.0, "finished": 200.0, "prompt": 200_000.0, "generated": 18_000.0}


def series(counts: list[float], usage: list[float], waiting: list[float] | None = None, **more: float) -> list[str]:
    """Pages with these preemption counts, KV usages and requests waiting for capacity."""
    waits = waiting or [0.0] * len(counts)
    return [
        page(
            preemptions=count,
            usage=used,
            waiting=wait,
            running=20,
            finished=100.0 * (n + 1),
            generated=9_000.0 * (n + 1),
            prompt=1e5 * (n + 1),
            **more,
        )
        for n, (count, used, wait) in enumerate(zip(counts, usage, waits, strict=True))
    ]


# preemption: what the counters really say


@pytest.mark.parametrize("counts", [[7, 7, 90, 90, 90], [0, 40, 41, 41, 41, 41], [500, 500, 500, 501, 520, 520, 520]])
def test_preemptions_in_neighbouring_intervals_that_end_are_one_burst(counts):
    answer = seen(*series(counts, [0.97] * len(counts)))
    assert answer.class_ == "preemption_single_burst"
    assert answer.findings[0].numbers["delta"] == counts[-1] - counts[0]
    assert answer.findings[0].severity == "info"


@pytest.mark.parametrize("counts", [[0, 3, 6, 8, 12], [100, 150, 151, 230, 260, 300], [0, 5, 5, 9, 12, 20]])
def test_preemptions_in_nearly_every_interval_to_the_end_are_continuous(counts):
    answer = seen(*series(counts, [0.99] * len(counts), [30.0] * len(counts)))
    assert answer.class_ == "preemption_continuous"
    assert "not an out-of-memory error" in answer.findings[0].reason
    assert "FP8" in " ".join(f.reason for f in answer.findings)


def test_a_burst_at_the_end_may_still_go_on():
    assert seen(*series([0, 0, 0, 20, 60], [0.99] * 5)).class_ == "preemption_ongoing"


def test_bursts_now_and_then_are_neither_one_burst_nor_continuous():
    assert seen(*series([0, 9, 9, 9, 15, 15, 15], [0.99] * 7)).class_ == "preemption_intermittent"


@pytest.mark.parametrize("counts", [[0, 44], [0, 44, 44]])
def test_under_three_intervals_have_no_shape(counts):
    answer = seen(*series(counts, [0.99] * len(counts)))
    assert (answer.class_, answer.findings[0].confidence) == ("preemption_shape_unknown", "unknown")


def test_one_page_alone_counts_from_the_start_and_says_so():
    answer = seen(page(preemptions=480, **BUSY))
    assert answer.class_ == "preemption_shape_unknown"
    assert "since the server's start" in answer.findings[0].reason


def test_few_requests_that_carry_most_are_told_from_many_with_one_each():
    few = [0.0] * 396 + [12.0, 14.0, 16.0, 18.0]
    many = [0.0] * 340 + [1.0] * 60
    before = page(version="0.31.0", per_request=[], usage=0.98)
    assert seen(before, page(version="0.31.0", per_request=few, preemptions=60, usage=0.98)).class_ == (
        "preemption_concentrated"
    )
    spread = seen(before, page(version="0.31.0", per_request=many, preemptions=60, usage=0.98))
    assert spread.class_ == "preemption_shape_unknown"


def test_requests_beyond_the_last_bucket_may_carry_more_than_is_provable():
    two = [0.0] * 298 + [60.0, 60.0]
    answer = seen(page(version="0.31.0", per_request=[]), page(version="0.31.0", per_request=two, preemptions=120))
    assert (answer.class_, answer.findings[0].confidence) == ("preemption_concentrated", "inferred")


def test_how_concentrated_is_told_with_bounds_that_hold():
    few = [0.0] * 396 + [12.0, 14.0, 16.0, 18.0]
    answer = seen(page(version="0.31.0", per_request=[]), page(version="0.31.0", per_request=few, preemptions=60))
    numbers = answer.findings[0].numbers
    assert numbers["heavy_requests"] == 4
    assert numbers["requests"] == 400
    assert 4 * 11 <= numbers["heavy_preemptions_least"] <= 60


def test_a_window_without_concentration_before_it_is_not_blamed_for_the_past():
    few = [0.0] * 96 + [15.0] * 4
    answer = seen(
        page(version="0.31.0", per_request=few, preemptions=60),
        page(version="0.31.0", per_request=few + [1.0] * 50, preemptions=110, usage=0.99),
    )
    assert "preemption_concentrated" not in classes(answer)


def test_preemptions_with_room_in_the_cache_come_from_elsewhere():
    quiet_cache = series([3, 3, 23, 23, 23], [0.2, 0.25, 0.22, 0.2, 0.21])
    assert seen(*quiet_cache).class_ == "preemption_not_from_kv_pressure"
    assert seen(*series([3, 3, 23, 23, 23], [0.2, 0.9, 0.99, 0.2, 0.21])).class_ == "preemption_single_burst"


def test_requests_put_back_into_the_queue_by_a_reset_are_no_pressure_where_pages_are_close():
    answer = seen(*series([3, 3, 23, 23], [0.2, 0.25, 0.05, 0.2], [0.0, 0.0, 18.0, 0.0]))
    assert answer.class_ == "preemption_not_from_kv_pressure"


def test_a_call_of_reset_is_named_where_the_page_counts_it():
    answer = seen(page(preemptions=0, usage=0.3, resets=0, **BUSY), page(preemptions=20, usage=0.3, resets=1, **LATER))
    assert answer.class_ == "preemption_not_from_kv_pressure"
    assert answer.findings[0].confidence == "inferred"
    assert answer.findings[0].numbers["reset_calls"] == 1


@pytest.mark.parametrize("resets", [0.0, 1.0])
def test_pages_of_an_idle_moment_say_nothing_about_the_pressure_between_them(resets: float):
    idle = [page(preemptions=n, usage=0.0, resets=r, finished=f) for n, r, f in ((0, 0, 10), (20, resets, 90))]
    answer = seen(*idle)
    assert (answer.class_, answer.findings[0].confidence) == ("preemption_shape_unknown", "unknown")
    assert "Don't resize" not in answer.findings[0].do
    assert ("One possibility" in answer.findings[0].reason) is bool(resets)


def test_a_reset_alone_does_not_say_that_the_cache_had_room():
    answer = seen(
        page(preemptions=0, usage=0.3, resets=0, **BUSY),
        page(preemptions=20, usage=0.3, resets=1, queue=0.5, ttft=1.0, **LATER),
    )
    assert answer.class_ == "preemption_shape_unknown"
    assert "a plain call preempts nobody" in answer.findings[0].reason


def test_two_pages_with_a_queue_between_them_are_not_called_free_of_pressure():
    answer = seen(
        page(preemptions=0, usage=0.3, queue=0.0, **BUSY), page(preemptions=20, usage=0.3, queue=0.5, ttft=1.0, **LATER)
    )
    assert answer.class_ == "preemption_shape_unknown"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"preemptions": 480}, {"preemptions": 480}),
        ({}, {"waiting": 40, "usage": 0.4}),
        ({}, {"usage": 0.99}),
        ({}, {"queue": 4.0, "ttft": 5.0}),
    ],
)
def test_what_looks_like_preemption_and_is_none(before, after):
    answer = seen(page(**BUSY | before), page(**LATER | after))
    assert answer.class_ == "not_preemption"
    assert "No request was preempted" in answer.findings[0].reason


def test_a_queue_for_seats_is_told_from_a_queue_for_room():
    seats = seen(page(waiting=30, usage=0.4, **BUSY), page(waiting=30, usage=0.4, **LATER))
    room = seen(page(waiting=30, usage=0.99, **BUSY), page(waiting=30, usage=0.99, **LATER))
    assert "for a seat in the batch" in seats.findings[0].reason and "--max-num-seqs" in seats.findings[0].do
    assert "for room in the KV cache" in room.findings[0].reason and "more seats would turn" in room.findings[0].do


def test_a_server_without_a_fault_is_not_given_one():
    assert classes(seen(page(**BUSY), page(**LATER))) == ["no_fault_seen"]
    assert classes(seen(page(), page()))[0] == "idle"


# the tier


def tiered(after: dict[str, float], before: dict[str, float] | None = None, **both) -> list[str]:
    return [
        page(connector=True, **{**BUSY, **(before or {}), **both}),
        page(connector=True, **{**LATER, **after, **both}),
    ]


def test_stores_without_loads_while_the_gpu_answers():
    answer = seen(*tiered({"store": 4e9, "local": 60_000.0, "asked": 40_000.0}))
    assert answer.class_ == "gpu_cache_answered"
    assert answer.findings[0].numbers["local_hits"] == 60_000


def test_stores_without_loads_while_nothing_comes_back():
    answer = seen(*tiered({"store": 4e9, "local": 0.0, "asked": 100_000.0}))
    assert answer.class_ == "no_reuse_in_workload"
    assert answer.findings[0].confidence == "inferred"
    assert "tier_is_no_saving_of_gpu_memory" in classes(answer)


def test_without_reuse_and_with_a_tier_known_to_be_larger_it_is_seen():
    large = {"cpu_kv_cache_size_tokens": "400000"}
    answer = seen(*tiered({"store": 4e9, "asked": 1e5}, version="0.33.0", tier=large))
    assert (answer.class_, answer.findings[0].confidence) == ("no_reuse_in_workload", "seen")


def test_a_window_of_few_requests_is_said_to_be_short():
    short = seen(*tiered({"store": 4e9, "asked": 1e5, "finished": 103.0}))
    assert "Only 3 requests ended in the window" in short.findings[0].reason
    assert "Only" not in seen(*tiered({"store": 4e9, "asked": 1e5})).findings[0].reason


def test_prefix_caching_switched_off_is_named():
    answer = seen(*tiered({"store": 4e9, "asked": 1e5}, cache={"enable_prefix_caching": "False"}))
    assert "enable_prefix_caching=False" in answer.findings[0].reason


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"version": "0.33.0", "tier": {"cpu_kv_cache_size_tokens": "30000"}}, None),
        ({"cache": {"kv_offloading_size": "4.0", "kv_cache_memory_bytes": str(20 * 2**30)}}, None),
        ({}, launch("--kv-offloading-size", "4", "--num-gpu-blocks-override", "4096")),
    ],
)
def test_a_tier_that_is_not_larger_than_the_gpu_cache(more, told):
    answer = seen(*tiered({"store": 4e9, "asked": 1e5}, **more), configuration=told)
    assert answer.class_ == "tier_smaller_than_gpu_kv"
    assert "mirror the GPU" in answer.findings[0].reason


@pytest.mark.parametrize(
    "more",
    [
        {"version": "0.33.0", "tier": {"cpu_kv_cache_size_tokens": "300000"}},
        {"cache": {"kv_offloading_size": "40.0", "kv_cache_memory_bytes": str(20 * 2**30)}},
    ],
)
def test_a_tier_that_is_larger_is_not_called_small(more):
    assert "tier_smaller_than_gpu_kv" not in classes(seen(*tiered({"store": 4e9, "asked": 1e5}, **more)))


def test_memory_set_aside_is_not_the_caches_size_where_its_blocks_are_overridden():
    overridden = {"num_gpu_blocks": "97", "num_gpu_blocks_override": "97", "kv_cache_size_tokens": "3104"}
    pages_ = tiered({"store": 4e9, "asked": 1e5}, cache={**overridden, "kv_cache_memory_bytes": str(2**28)})
    other = launch("--num-gpu-blocks-override", "97", "--kv-cache-memory-bytes", "256M", "--kv-offloading-size", "0.25")
    other = msgspec.structs.replace(other, launch=ArmLaunch(["serve", "unknown/model", *other.launch.argv[2:]], {}))
    assert classes(seen(*pages_, configuration=other))[0] == "no_reuse_in_workload"


def test_loads_are_a_tier_that_serves_whatever_the_gauges_say():
    answer = seen(*tiered({"store": 4e9, "load": 4.4e9, "load_seconds": 0.2, "external": 38_000.0}))
    assert answer.class_ == "healthy_tier_serving"
    assert answer.findings[0].numbers["bandwidth_gb_s"] == 22.0
    assert answer.settle is not None and "kvtrial_hit_share_percent=38" in answer.settle.command


def test_a_tier_that_is_not_larger_and_serves_all_the_same_is_not_called_small():
    small = {"version": "0.33.0", "tier": {"cpu_kv_cache_size_tokens": "30000"}}
    served = seen(*tiered({"load": 4.4e9, "load_seconds": 0.2, "external": 38_000.0}, **small))
    assert served.class_ == "healthy_tier_serving" and "although it is not larger" in served.findings[0].reason
    hardly = seen(*tiered({"load": 4.4e7, "load_seconds": 0.002, "external": 380.0}, **small))
    assert hardly.class_ == "tier_smaller_than_gpu_kv"


def test_the_tiers_tokens_follow_from_its_chunks():
    chunks = {"cpu_num_chunks": "1000", "cpu_blocks_per_chunk": "2"}
    answer = seen(*tiered({"store": 4e9, "asked": 1e5}, version="0.33.0", tier=chunks))
    assert answer.findings[0].numbers["tier_tokens"] == 32_000


def test_loads_without_hits_belong_to_preempted_requests():
    answer = seen(*tiered({"load": 4.4e9, "load_seconds": 0.2, "external": 0.0, "preemptions": 30.0, "usage": 0.99}))
    served = next(f for f in answer.findings if f.class_ == "healthy_tier_serving")
    assert "preempted requests" in served.reason


def test_a_reset_that_left_the_tier_warm():
    load = {"load": 4.4e9, "load_seconds": 0.2, "external": 38_000.0}
    assert "reset_kept_the_tier" in classes(seen(*tiered({**load, "resets": 1}, {"resets": 0})))
    assert "reset_kept_the_tier" not in classes(seen(*tiered({**load, "resets": 1}, {"resets": 1})))


def test_loads_as_slow_as_pageable_memory():
    slow = {"load": 8e9, "load_seconds": 3.0, "external": 70_000.0}
    answer = seen(*tiered(slow))
    assert (answer.class_, answer.findings[0].confidence) == ("tier_not_pinned", "inferred")
    assert "healthy_tier_serving" in classes(answer)
    # Small transfers are slow by their number, whatever the memory.
    assert seen(*tiered({**slow, "load_jobs": 80_000.0})).class_ == "healthy_tier_serving"


def test_requests_put_off_behind_a_load():
    both = {"deferred": 12.0, "running": 2.0}
    load = {"load": 9e9, "load_seconds": 0.4, "external": 80_000.0, "lookups": 90.0, "lookup_seconds": 3.0, "ttft": 4.0}
    answer = seen(*tiered(load, **both))
    assert answer.class_ == "deferred_behind_load"
    assert answer.findings[0].numbers["deferred"] == 12
    assert "not a shortage of KV memory" in answer.findings[0].reason
    quiet = seen(*tiered({**load, "lookup_seconds": 0.001}, {"deferred": 1.0}))
    assert quiet.class_ == "healthy_tier_serving"


def test_the_labelled_family_is_read_where_the_flat_one_is_not_there_yet():
    answer = seen(*tiered({"store": 4e9, "load": 2e9, "external": 20_000.0}, version="0.20.2"))
    assert answer.class_ == "healthy_tier_serving"
    assert answer.findings[0].numbers["load"] == 2e9


def test_no_connector_is_no_finding_about_a_tier():
    assert classes(seen(page(local=0, **BUSY), page(local=50_000, **LATER))) == ["no_fault_seen"]


def test_a_connector_that_was_asked_for_and_is_not_there():
    asked = launch("--kv-offloading-size", "8")
    assert "connector_absent" in classes(seen(page(**BUSY), page(**LATER), configuration=asked))
    there = seen(*tiered({"store": 4e9, "load": 2e9, "external": 2e4}), configuration=asked)
    assert "connector_absent" not in classes(there)


def test_stores_that_found_no_room():
    answer = seen(*tiered({"store": 4e9, "failed_stores": 20.0, "asked": 1e5}, {"failed_stores": 0.0}))
    assert "tier_full" in classes(answer)


# defects at work


def stuck(**more: float) -> list[str]:
    same = {**BUSY, "running": 0.0, "waiting": 1.0, "deferred": 5.0, **more}
    return [page(connector=True, **same), page(connector=True, **same)]


def test_a_scheduler_that_stands_still_is_seen_at_any_usage():
    for usage in (0.0, 0.61, 0.99):
        answer = seen(*stuck(usage=usage))
        assert classes(answer) == ["scheduler_deadlock"]
    assert "no part of the rule" in answer.findings[0].reason


def test_waiting_while_tokens_come_or_nobody_waiting_is_no_deadlock():
    moving = [page(running=0, waiting=6, generated=g, finished=100.0) for g in (9e3, 9.5e3)]
    assert "scheduler_deadlock" not in classes(seen(*moving))
    assert "scheduler_deadlock" not in classes(seen(page(), page()))
    assert "scheduler_deadlock" not in classes(seen(stuck()[0]))


def test_which_deadlock_is_known_follows_from_the_version():
    old = seen(*[page(version="0.22.1", running=0, waiting=6) for _ in range(2)], version="0.22.1")
    new = seen(*[page(version="0.28.0", connector=True, running=0, waiting=6) for _ in range(2)], version="0.28.0")
    assert "deadlock-kv-pressure" in old.findings[0].numbers["known"]
    assert new.findings[0].numbers["known"] == ["deadlock-async-load"]


def cascade(made: str, variant: float = 90.0, control: float = 3.0, usage: float = 0.97, **more):
    return seen(
        page(version=made, connector=True, usage=usage, **BUSY),
        page(version=made, connector=True, usage=usage, preemptions=variant, store=1e9, asked=1e5, **LATER),
        control=(
            page(version=made, usage=0.97, **BUSY),
            page(version=made, usage=0.97, preemptions=control, **LATER),
        ),
        **more,
    )


def test_preemptions_in_the_offload_arm_alone_at_equal_usage_are_the_cascade():
    answer = cascade("0.27.1")
    assert answer.class_ == "version_hazard_preemption_cascade"
    assert (answer.findings[0].numbers["variant"], answer.findings[0].numbers["control"]) == (90, 3)
    assert "#49674" in answer.findings[0].reason and "--no-async-scheduling" in answer.findings[0].do


@pytest.mark.parametrize(
    "answer",
    [
        cascade("0.30.0"),
        cascade("0.31.0", version="0.31.0"),
        cascade("0.27.1", control=80.0),
        cascade("0.27.1", usage=0.5),
        cascade("0.26.0", configuration=launch("--no-async-scheduling", version="0.26.0"), version="0.26.0"),
    ],
    ids=["newer by its page", "newer as stated", "control alike", "another load", "async scheduling off"],
)
def test_other_differences_are_not_called_the_cascade(answer):
    assert "version_hazard_preemption_cascade" not in classes(answer)


# the window


def test_a_restart_that_every_counter_has_overtaken_is_seen_by_its_start_times():
    answer = seen(page(**BUSY), page(started=1_790_009_000.0, **LATER))
    assert (answer.verdict, classes(answer)) == ("INVALID", ["counter_reset"])
    assert "preemptions in the window" not in answer.findings[0].reason


def test_a_restart_is_seen_by_created_where_there_is_no_process_start_time():
    without = [
        "\n".join(line for line in text.splitlines() if not line.startswith("process_")) + "\n"
        for text in (page(**BUSY), page(started=1_790_009_000.0, **LATER))
    ]
    assert seen(*without).class_ == "counter_reset"


def test_a_restart_between_later_pages_is_found_and_placed():
    answer = seen(page(**BUSY), page(**LATER), page(started=1_790_009_000.0, **BUSY))
    assert "between page 2 and page 3" in answer.findings[0].reason


def test_counters_that_fell_without_a_restart_are_pages_out_of_order_or_of_two_servers():
    answer = seen(page(**LATER), page(**BUSY))
    assert answer.class_ == "counter_reset"
    assert "another order" in answer.findings[0].reason
    assert "Give the pages in the order" in answer.findings[0].do and "restarted" not in answer.findings[0].do


def test_pages_from_before_and_after_a_restart_that_were_swapped_are_no_restart():
    swapped = seen(page(started=STARTED + 900, **BUSY), page(**LATER))
    assert swapped.class_ == "counter_reset" and "The server was restarted" not in swapped.findings[0].reason
    assert "Give the pages in the order" in swapped.findings[0].do
    restarted = seen(page(**LATER), page(started=STARTED + 900, **BUSY))
    assert "Find out why the server restarted" in restarted.findings[0].do


def test_a_window_without_a_restart_is_usable():
    assert "counter_reset" not in classes(seen(page(**BUSY), page(**LATER)))


def test_requests_that_the_client_sent_and_nobody_counted():
    drained = {"running": 0.0}
    answer = seen(page(**BUSY | drained), page(**LATER | drained), client=Client(sent=120, aborted=20))
    assert (answer.verdict, answer.class_) == ("INVALID", "requests_missing")
    assert answer.findings[0].numbers["missing"] == 20
    assert "requests_missing" not in classes(
        seen(page(**BUSY | drained), page(**LATER | drained), client=Client(sent=100))
    )


def test_requests_still_there_are_not_missing():
    assert "requests_missing" not in classes(
        seen(page(**BUSY | {"running": 0.0}), page(**LATER), client=Client(sent=120))
    )


def test_requests_of_somebody_else_are_not_the_clients():
    answer = seen(page(**BUSY | {"running": 0.0}), page(**LATER | {"running": 0.0}), client=Client(sent=60))
    assert (answer.verdict, answer.class_) == ("INVALID", "requests_of_others")


def test_first_tokens_without_an_end_show_aborted_requests_without_a_client():
    answer = seen(page(**BUSY), page(**LATER, first_tokens=260))
    assert "requests_aborted" in classes(answer)
    assert next(f for f in answer.findings if f.class_ == "requests_aborted").numbers["missing"] == 40
    assert "requests_aborted" not in classes(seen(page(**BUSY), page(**LATER, first_tokens=215)))


def test_answers_that_end_far_below_what_was_asked_for():
    asked = {"asked_output": 4096.0, "real_output": 90.0}
    assert "output_shorter_than_requested" in classes(seen(page(**BUSY, **asked), page(**LATER, **asked)))
    full = {"asked_output": 100.0, "real_output": 90.0}
    assert "output_shorter_than_requested" not in classes(seen(page(**BUSY, **full), page(**LATER, **full)))


def test_sureness_is_stated_for_every_finding():
    answers = [
        seen(*tiered({"store": 4e9, "asked": 1e5})),
        seen(page(preemptions=3)),
        seen(page(**BUSY), page(**LATER)),
    ]
    assert {f.confidence for answer in answers for f in answer.findings} == {"inferred", "unknown", "seen"}


def test_versions_by_what_the_page_exports():
    for version, described in [
        ("0.14.1", "below 0.16"),
        ("0.18.1", "0.16 to below 0.20"),
        ("0.22.1", "0.20 to below 0.30"),
        ("0.26.0", "0.24 to below 0.30"),
        ("0.31.0", "0.30 or newer"),
        ("0.32.0", "0.32 or newer"),
    ]:
        assert pages(page(version=version)).versions.described() == described


def test_requests_in_the_batch_without_a_token_are_a_stall():
    hung = page(running=8, waiting=5, usage=0.6, finished=50, prompt=1e5, generated=9e3)
    assert classes(seen(hung, hung, hung)) == ["engine_stalled"]
    short = observe(pages(hung, hung, interval=5.0))
    assert (short.class_, short.findings[0].confidence) == ("standstill_unknown", "unknown")


def test_a_deadlock_is_not_declared_on_a_few_seconds():
    still = page(running=0, waiting=5, usage=0.6, finished=50, prompt=1e5, generated=9e3)
    assert observe(pages(still, still, interval=4.0)).class_ == "standstill_unknown"
    assert observe(pages(still, still, interval=12.0)).class_ == "scheduler_deadlock"


def test_deferred_requests_without_a_connector_are_mentioned():
    behind = [page(running=2, deferred=6, finished=10.0 * n, generated=500.0 * n, prompt=1e4 * n) for n in (1, 2, 3)]
    answer = seen(*behind)
    assert answer.class_ == "requests_deferred"
    assert answer.findings[0].numbers["deferred"] == 6


CPU = "process_cpu_seconds_total {}\n"


@pytest.mark.parametrize("held", [{"running": 3.0}, {"running": 0.0, "waiting": 6.0}])
def test_one_scrape_given_twice_is_no_standstill(held: dict[str, float]):
    once = page(**BUSY | held) + CPU.format(41.5)
    answer = seen(once, once)
    assert classes(answer)[:1] == ["standstill_unknown"] and answer.findings[0].confidence == "unknown"
    assert "the same scrape twice" in answer.findings[0].reason
    assert "Nothing can be told of a window" in answer.findings[0].reason


@pytest.mark.parametrize(
    ("held", "class_"),
    [({"running": 3.0}, "engine_stalled"), ({"running": 0.0, "waiting": 6.0}, "scheduler_deadlock")],
)
def test_a_hung_engine_moves_what_a_scrape_moves_and_where_that_is_not_exported_it_is_inferred(
    held: dict[str, float], class_: str
):
    text = page(**BUSY | held)
    hung = seen(text + CPU.format(41.5), text + CPU.format(41.6))
    assert hung.class_ == class_ and "same scrape" not in hung.findings[0].reason
    alike = seen(text, text)
    assert alike.class_ == class_ and alike.findings[0].confidence == "inferred"
    assert "the same scrape twice (a copy, a caching proxy) looks like this too" in alike.findings[0].reason
