"""The controller's part of an observation: files for each server, one answer for the fleet."""

import base64
import json
import zlib
from pathlib import Path

import pytest
from kvtrial.analysis.fleetview import Observed, fleet_lines, some
from kvtrial.analysis.observing import observe_fleet

FIXTURES = Path(__file__).parents[2] / "fixtures"


def packed(text):
    return base64.b64encode(zlib.compress(text.encode())).decode()


def looked(port=8000, text="vllm:x 1\n", at=100.0, **more):
    page = {"text": packed(text) if text else None, "monotonic_seconds": at, "error": None if text else "refused"}
    return {"servers": [{"port": port, "page": page, "facts": {"argv": ["vllm", "serve", "m"]}, **more}]}


def answer(class_="idle", severity="info", **more):
    finding = {"class": class_, "severity": severity, "reason": f"It is {class_}", "do": "Nothing.", "numbers": {}}
    return {"verdict": "report", "class": class_, "findings": [finding], **more}


class Asked:
    """Stands in for `kvtrial observe`: keeps the command lines and gives answers."""

    def __init__(self, *answers):
        self.answers, self.commands = list(answers), []

    def __call__(self, arguments):
        self.commands.append(arguments)
        given = self.answers.pop(0) if self.answers else answer()
        return given if isinstance(given, tuple) else (0, json.dumps(given))


def test_observe_is_asked_with_what_each_host_told_and_the_time_between(tmp_path):
    ask = Asked(answer("preemption_continuous", "warn"))
    second = looked(at=160.5, log={"text": packed("a line\n"), "source": "journal"})
    told = observe_fleet({"gpu01": looked()}, {"gpu01": second}, tmp_path, ask)
    folder = tmp_path / "gpu01" / "8000"
    assert ask.commands == [
        ["observe", "--host", f"{folder}/facts.json", "--metrics", f"{folder}/0.prom", f"{folder}/1.prom",
         "--interval", "60.500", "--log", f"{folder}/server.log", "--json"]
    ]  # fmt: skip
    assert json.loads((folder / "facts.json").read_text())["host"] == "gpu01:8000"
    assert (folder / "server.log").read_text() == "a line\n"
    assert json.loads((folder / "answer.json").read_text())["class"] == "preemption_continuous"
    assert told["servers"] == {"gpu01:8000": "preemption_continuous"}
    assert told["answer"][:2] == [
        "gpu01:8000: preemption_continuous", "  - preemption_continuous: It is preemption_continuous. Nothing."
    ]  # fmt: skip
    assert told["answer"][-2] == "Fleet: 1 server on 1 host, two looks 60 s apart. preemption_continuous: gpu01:8000."
    assert json.loads((tmp_path / "fleet.json").read_text())["servers"] == told["servers"]


def test_a_host_that_was_lost_and_one_without_a_server_are_named(tmp_path):
    first = {
        "a": looked(),
        "b": {"servers": []},
        "c": {"unreachable": True, "msg": "Failed to connect to the host via ssh"},
    }
    told = observe_fleet(first, {}, tmp_path, Asked())
    assert "c could not be asked: Failed to connect to the host via ssh." in told["answer"]
    assert "No vLLM server was found on b." in told["answer"]
    assert "1 server on 3 hosts, one look" in told["answer"][-2]
    assert told["exit_status"] == 0


@pytest.mark.parametrize(
    ("first", "cause"),
    [
        ({"a": {"servers": []}}, "No vLLM server was found on a"),
        ({"a": {"msg": "no route"}}, "No host could be asked: no route"),
        ({"a": looked(text=None)}, "No server could be read: a:8000: /metrics could not be read (refused)"),
    ],
)
def test_where_nothing_could_be_read_it_says_why(first, cause, tmp_path):
    told = observe_fleet(first, {}, tmp_path, Asked())
    assert told["exit_status"] == 2
    assert told["cause"].startswith(cause)


def test_a_server_that_died_between_the_looks_is_asked_with_what_there_is(tmp_path):
    second = looked(text=None, log={"text": packed("EngineDeadError\n"), "source": "x"})
    ask = Asked()
    observe_fleet({"a": looked()}, {"a": second}, tmp_path, ask)
    (command,) = ask.commands
    assert command.count(f"{tmp_path}/a/8000/0.prom") == 1 and "--interval" not in command and "--log" in command


def test_a_log_that_is_none_of_an_engines_does_not_hide_the_pages(tmp_path):
    refused = (2, json.dumps(answer("unusable_input", "refuse")))
    ask = Asked(refused, answer("idle"))
    second = looked(at=160, log={"text": packed("nothing\n"), "source": "x"})
    told = observe_fleet({"a": looked()}, {"a": second}, tmp_path, ask)
    assert told["servers"] == {"a:8000": "idle"} and "--log" not in ask.commands[1]


def test_what_observe_refuses_is_said_in_its_sentence(tmp_path):
    ask = Asked((2, json.dumps(answer("not_vllm_metrics", "refuse"))))
    told = observe_fleet({"a": looked()}, {}, tmp_path, ask)
    assert told["cause"] == "No server could be read: a:8000: It is not_vllm_metrics"
    told = observe_fleet({"a": looked()}, {}, tmp_path, Asked((2, "usage: kvtrial\nno such command\n")))
    assert told["cause"].endswith("no such command")


def test_a_name_of_a_host_stays_within_the_folder(tmp_path):
    observe_fleet({"../../x": looked()}, {}, tmp_path / "o", Asked())
    assert [path.name for path in tmp_path.iterdir()] == ["o"]
    assert (tmp_path / "o" / "_.._x" / "8000" / "0.prom").exists()


# --- the fleet's answer


def lines(*servers, without=(), lost=None):
    return list(fleet_lines(list(servers), list(without), lost or {}, "two looks 60 s apart"))


def test_who_needs_somebody_comes_first_and_defects_are_told_once():
    hazard = {"id": "preemption-cascade", "action": "guard", "guarded": False, "title": "Async scheduling"}
    set_already = {**hazard, "id": "other", "guarded": True}
    watched = {**hazard, "id": "quiet", "action": "watch", "state": "applies"}
    gone_off = {**watched, "id": "tier-full", "state": "seen", "title": "No room"}
    said = lines(
        Observed(
            "a", 1, answer("idle", server={"version": "0.26.0"}, hazards=[hazard, set_already, watched, gone_off])
        ),
        Observed("b", 1, answer("tier_full", "warn", server={"version": "0.32.0"}, hazards=[hazard])),
    )
    assert said[0] == "b:1 (vLLM 0.32.0): tier_full"
    assert "Known defect preemption-cascade (guard): Async scheduling. a:1, b:1." in said
    assert "Known defect tier-full (seen): No room. a:1." in said
    assert not any("other" in line or "quiet" in line for line in said)
    assert "The fleet runs 2 versions of vLLM: 0.26.0 on a:1; 0.32.0 on b:1." in said
    assert said[-1] == "Fleet: 2 servers on 2 hosts, two looks 60 s apart. idle: a:1; tier_full: b:1."


def test_what_is_not_certain_is_said_so_and_the_experiment_is_named():
    inferred = answer("deferred", "warn", settle={"question": "Does it pay?", "command": "ansible-playbook x"})
    inferred["findings"][0]["confidence"] = "inferred"
    said = lines(Observed("a", None, inferred))
    assert said[1] == "  - deferred (inferred): It is deferred. Nothing."
    assert said[2] == "  Open: Does it pay? ansible-playbook x"


def test_of_many_names_some_are_shown():
    assert some([f"h{n}" for n in range(9)]) == "h0, h1, h2, h3, h4 and 4 more"
    assert some(["b", "a"]) == "a, b"


def test_with_the_command_itself_real_pages_become_an_answer(tmp_path):
    pytest.importorskip("kvtrial.analysis.observe")
    pages = [
        (FIXTURES / "metrics" / f"vllm-0.26.0-h200-8b-offload-{when}-return.prom").read_text()
        for when in ("before", "after")
    ]
    first, second = (looked(text=text, at=at) for text, at in zip(pages, (0.0, 60.0), strict=True))
    first["servers"][0]["facts"]["vllm_version"] = "0.26.0"
    told = observe_fleet({"gpu01": first}, {"gpu01": second}, tmp_path)
    assert told["exit_status"] == 0, told
    assert json.loads((tmp_path / "gpu01/8000/answer.json").read_text())["verdict"] == "report"
