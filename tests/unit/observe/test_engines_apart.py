"""One engine of several on a page that stands still is named, and those that go on are judged by themselves."""

import pytest
from kvtrial.analysis.cli import main
from planted import classes, log_of, logged, page, pages, seen, status_line

HUNG = {"running": 8.0, "waiting": 5.0, "usage": 0.6, "finished": 50.0, "prompt": 1e5, "generated": 9e3}
STUCK = {**HUNG, "running": 0.0}


def working(step: int, **more: float) -> dict[str, float]:
    return {"running": 4.0, "usage": 0.3, "finished": 100.0 + 20 * step, "prompt": 1e5 + 2e4 * step,
            "generated": 1e4 + 4e3 * step, **more}  # fmt: skip


def together(*engines: dict[str, float], model: str = "some-model") -> str:
    """One page of several engines of one process, numbered from 0: a family's samples stand below each other."""
    texts = [page(engine=str(n), model=model, **given).splitlines() for n, given in enumerate(engines)]
    lines, seen_lines = [], set()
    for row in zip(*texts, strict=True):
        for line in row:
            if not line.startswith(("#", "process")) or line not in seen_lines:
                lines.append(line)
                seen_lines.add(line)
    return "\n".join(lines) + "\n"


def test_a_hung_engine_beside_one_that_works_is_named():
    answer = seen(*[together(working(n), HUNG) for n in range(3)])
    first = answer.findings[0]
    assert (first.class_, first.about) == ("engine_stalled", "engine 1")
    assert "Engine 1 of 2" in first.reason
    assert "engine 0 goes on (8,000 tokens generated, 40 requests ended)" in first.reason
    assert "looks healthy" in first.reason
    assert first.numbers["engines_stuck"] == ["1"]
    assert [one.about for one in answer.findings if one.class_ == "engine_stalled"] == ["engine 1"]


def test_a_stuck_scheduler_of_one_engine_is_named():
    answer = seen(*[together(STUCK, working(n), working(n)) for n in range(3)])
    assert (answer.class_, answer.findings[0].about) == ("scheduler_deadlock", "engine 0")
    assert answer.findings[0].numbers["waiting"] == [5.0, 5.0, 5.0]
    assert "engine 1 goes on" in answer.findings[0].reason
    assert "engine 2 goes on" in answer.findings[0].reason


def test_the_queue_before_a_hung_engine_is_no_queue_for_seats():
    answer = seen(*[together(working(n), HUNG) for n in range(3)])
    assert "not_preemption" not in classes(answer)
    busy = [together(working(n, preemptions=9.0 * n, usage=0.99), HUNG) for n in range(4)]
    found = {one.class_: one for one in seen(*busy).findings}
    assert found["preemption_continuous"].about == "engine 0"
    assert found["preemption_continuous"].numbers["delta"] == 27


def test_two_engines_that_hang_in_two_ways_beside_one_that_works():
    answer = seen(*[together(HUNG, STUCK, working(n)) for n in range(3)])
    assert {one.class_: one.about for one in answer.findings[:2]} == {
        "scheduler_deadlock": "engine 1",
        "engine_stalled": "engine 0",
    }


def test_a_hung_engine_beside_an_idle_one():
    answer = seen(*[together(HUNG, {}) for _ in range(3)])
    assert (answer.class_, answer.findings[0].about) == ("engine_stalled", "engine 0")
    assert "engine 1 is idle" in answer.findings[0].reason
    assert "looks healthy" not in answer.findings[0].reason


def test_where_all_engines_hang_it_is_the_server():
    answer = seen(*[together(HUNG, HUNG) for _ in range(3)])
    assert (answer.class_, answer.findings[0].about) == ("engine_stalled", None)


@pytest.mark.parametrize("other", [working(0), {}], ids=["busy", "idle"])
def test_engines_that_work_or_have_nothing_to_do_hang_not(other):
    answer = seen(*[together(working(n), {**other, **(working(n) if other else {})}) for n in range(3)])
    assert not {"engine_stalled", "scheduler_deadlock", "standstill_unknown"} & set(classes(answer))


def test_two_pages_too_near_leave_it_open_which_engine_hangs():
    answer = seen(*[together(working(n), HUNG) for n in range(2)])
    assert answer.class_ == "engine_stalled"
    from kvtrial.analysis.observe.answer import observe

    near = observe(pages(*[together(working(n), HUNG) for n in range(2)], interval=5.0)).findings
    assert [(one.class_, one.about) for one in near if one.confidence == "unknown"] == [
        ("standstill_unknown", "engine 1")
    ]


def test_the_command_says_which_engine(tmp_path, capsys):
    files = []
    for n in range(3):
        files.append(tmp_path / f"{n}.prom")
        files[-1].write_text(together(working(n), HUNG))
    assert main(["observe", "--metrics", *map(str, files), "--interval", "20"]) == 0
    said = capsys.readouterr().out
    assert "- engine_stalled [engine 1] (inferred): Engine 1 of 2" in said


def test_lines_of_a_log_are_told_apart_in_the_same_way():
    lines = [
        line
        for n in range(6)
        for line in (
            status_line(10 * n, engine="000", running=3),
            status_line(10 * n, engine="001", running=2, waiting=1, generation=0),
        )
    ]
    answer = logged(log_of(*lines))
    assert (answer.class_, answer.findings[0].about) == ("engine_stalled", "engine 001")


def test_an_engine_that_is_only_on_the_second_page_is_left_out_and_said():
    late = {"preemptions": 500.0, "finished": 5000.0, "prompt": 9e6, "generated": 9e5, "running": 3.0}
    answer = seen(together(working(0)), together(working(1), late))
    assert "preemptions" not in answer.findings[0].reason
    assert not any("preemption" in name for name in classes(answer))
    assert any("Engine 1 is not on the first page: no difference known" in note for note in answer.notes)


def test_an_engine_that_vanished_is_named():
    gone = seen(together(working(0), working(0)), together(working(1)))
    assert gone.class_ == "counter_reset" and "engine 1 vanished" in gone.findings[0].reason
    assert gone.findings[0].numbers["engines_vanished"] == ["1"]
    assert "why an engine left" in gone.findings[0].do
    assert any("Engine 1 is on the first page and not on the last" in note for note in gone.notes)
    unused = seen(together(working(0), {}), together(working(1)))
    assert any("Engine 1 is on the first page and not on the last" in note for note in unused.notes)
