"""The command line: every input by its option, and what does not go together."""

import json
from pathlib import Path

import pytest
from kvtrial.analysis.cli import main
from planted import CASES, log_of, page, status_line

BUSY = {"finished": 100.0, "prompt": 1e5, "generated": 9e3}
LATER = {"finished": 200.0, "prompt": 2e5, "generated": 1.8e4}


def written(folder: Path, **texts: str) -> dict[str, str]:
    """Files of these contents, by name."""
    paths = {}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        paths[name] = str(folder / f"{name}.txt")
    return paths


def asked(capsys, *arguments: str) -> dict:
    assert main(["observe", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_pages_of_a_control_go_beside_the_others(tmp_path, capsys):
    files = written(
        tmp_path,
        a=page(connector=True, usage=0.97, **BUSY),
        b=page(connector=True, usage=0.97, preemptions=90, store=1e9, asked=1e5, **LATER),
        c=page(usage=0.97, **BUSY),
        d=page(usage=0.97, preemptions=2, **LATER),
    )
    answer = asked(capsys, "--metrics", files["a"], files["b"], "--control", files["c"], files["d"])
    assert answer["class"] == "version_hazard_preemption_cascade"


def test_a_client_goes_beside_pages(tmp_path, capsys):
    files = written(tmp_path, a=page(**BUSY), b=page(**LATER), client='{"sent": 130, "completed": 100}')
    answer = asked(capsys, "--metrics", files["a"], files["b"], "--client", files["client"], "--interval", "1m")
    assert (answer["verdict"], answer["class"]) == ("INVALID", "requests_missing")
    assert answer["server"]["window_seconds"] == 60


def test_a_log_beside_pages_says_the_version(tmp_path, capsys):
    log = log_of(status_line(0), version="0.28.0")
    files = written(tmp_path, a=page("0.28.0", **BUSY), b=page("0.28.0", **LATER), log=log)
    answer = asked(capsys, "--metrics", files["a"], files["b"], "--log", files["log"])
    assert answer["server"]["version"] == "0.28.0"


def test_a_configuration_alone_is_judged(capsys):
    path = CASES / "01-both-interfaces" / "config.yml"
    answer = asked(capsys, "--config", str(path), "--arm", "variant")
    assert answer["class"] == "mixed_interfaces"
    assert {hazard["id"] for hazard in answer["hazards"]} >= {"shortcut-overwrites"}


def test_the_same_input_gives_the_same_answer(tmp_path, capsys):
    files = written(tmp_path, a=page(connector=True, **BUSY), b=page(connector=True, preemptions=9, **LATER))
    first = asked(capsys, "--metrics", files["a"], files["b"])
    assert first == asked(capsys, "--metrics", files["a"], files["b"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--metrics", "a", "--url", "h"], "both given"),
        (["--control", "a", "--log", "b"], "--control needs the pages"),
        (["--url", "h:1", "--reads", "1"], "too few"),
        (["--metrics", "a", "--vllm", "newest"], "not of the form"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(arguments: list[str], says: str, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text(page())
    (tmp_path / "b").write_text(log_of(status_line(0)))
    assert main(["observe", *arguments]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize("window", ["0", "-5", "soon", "1h"])
def test_a_window_must_be_a_duration(window: str, capsys):
    with pytest.raises(SystemExit):
        main(["observe", "--url", "h", f"--window={window}"])
    assert "no duration above 0" in capsys.readouterr().err


def test_a_version_newer_than_any_read_has_the_hazards_of_the_newest_as_possible(tmp_path, capsys):
    files = written(
        tmp_path,
        a=page(connector=True, version="0.33.0", **BUSY),
        b=page(connector=True, version="0.33.0", **LATER),
        log=log_of(*(status_line(10 * n) for n in range(4)), version="0.35.0"),
        serve="vllm serve Qwen/Qwen3-0.6B --kv-offloading-size 16",
    )
    for given in (["--metrics", files["a"], files["b"]], ["--log", files["log"]], ["--config", files["serve"]]):
        answer = asked(capsys, *given, "--vllm", "0.35.0")
        assert answer["hazards"] == [] and answer["hazards_possible"]
        assert sum("newer than 0.33" in note for note in answer["notes"]) == 1
        assert any("looked for by feature" in note for note in answer["notes"])


def test_a_check_for_a_version_newer_than_any_read_says_so(tmp_path, capsys):
    launch = tmp_path / "launch.yml"
    launch.write_text(
        "host: {}\nvllm: {version: 0.35.0}\narms: {a: {args: [m, --host, '::1']}, b: {args: [m, --host, '::1']}}\n"
    )
    main(["check", str(launch)])
    assert "Note: Which defects 0.35.0 has is not known" in capsys.readouterr().out
