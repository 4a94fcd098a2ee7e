"""The command of a campaign: kept as it was typed, without secrets, and given again."""

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from kvtrial.analysis.campaign import Campaign
from kvtrial.analysis.commandline import portable
from kvtrial.analysis.reproduce import Archive, commands_of
from kvtrial.record.plan import Plan


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "project" / "inventories" / "fleet").mkdir(parents=True)
    (tmp_path / "project" / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "project" / ".venv" / "bin" / "ansible-playbook").touch()
    (tmp_path / "project" / "experiment.yml").touch()
    return tmp_path / "project"


def test_paths_in_the_project_are_seen_from_its_root(root: Path) -> None:
    program = str(root / ".venv" / "bin" / "ansible-playbook")
    typed = [program, "../experiment.yml", "-i", str(root / "inventories" / "fleet"), "-e", "protocol=aa_noise"]
    assert portable(typed, root, root / "inventories") == [
        ".venv/bin/ansible-playbook", "experiment.yml", "-i", "inventories/fleet", "-e", "protocol=aa_noise",
    ]  # fmt: skip
    assert portable(["/elsewhere/ansible-playbook", "/elsewhere/x.yml"], root, root) == [
        "ansible-playbook",
        "/elsewhere/x.yml",
    ]


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("ansible_become_password=hunter2 protocol=aa_noise", "ansible_become_password=REDACTED protocol=aa_noise"),
        ("ansible_password='hunter 2'", "ansible_password=REDACTED"),
        ("api_key=hunter2", "api_key=REDACTED"),
        ('{"hub_token": "hunter2", "kvtrial_pairs": 6}', '{"hub_token": "REDACTED", "kvtrial_pairs": 6}'),
        ("{a: {secret: hunter2}}", '{"a": {"secret": "REDACTED"}}'),
        ("{hunter2: [", "REDACTED"),
        (
            "kvtrial_model_endpoint=https://me:hunter2@mirror.example/",
            "kvtrial_model_endpoint=https://***@mirror.example/",
        ),
        ("kvtrial_connector_extra_keys=a,b", "kvtrial_connector_extra_keys=a,b"),
        ("kvtrial_model_token_file=/etc/token", "kvtrial_model_token_file=/etc/token"),
        (
            "kvtrial_history_webhook=https://hooks.example/T0/hunter2 protocol=aa_noise",
            "kvtrial_history_webhook=REDACTED protocol=aa_noise",
        ),
        (
            '{"kvtrial_history_webhook": "https://hooks.example/T0/hunter2"}',
            '{"kvtrial_history_webhook": "REDACTED"}',
        ),
        ("max_tokens=64", "max_tokens=64"),
        ("@vars.yml", "@vars.yml"),
    ],
)
def test_what_looks_like_a_secret_is_left_out(word: str, kept: str, root: Path) -> None:
    for typed in (["ansible-playbook", "-e", word], ["ansible-playbook", f"--extra-vars={word}"],
                  ["ansible-playbook", f"-e{word}"]):  # fmt: skip
        found = " ".join(portable(typed, root, root))
        assert found.endswith(kept)
        assert "hunter" not in found


def test_a_report_says_the_command_that_was_typed_with_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiment.yml").touch()
    monkeypatch.chdir(tmp_path.parent)
    plan = Plan(schema_version="1.0", protocol=cast(Any, None), seed=7, hosts=[], estimates={})
    campaign = Campaign(
        schema_version="1.0", campaign="c1", plan=plan, plan_sha256="x", pins={}, provenance={}, own_hit_share=None,
        command=["ansible-playbook", "experiment.yml", "-e", "a b=1"],
    )  # fmt: skip
    said = commands_of(tmp_path / "results" / "c 1", campaign, [], "ru", ["--history", "h.json"])
    assert said == {
        "campaign": "ansible-playbook experiment.yml -e 'a b=1' -e kvtrial_seed=7 -e kvtrial_new_campaign=true",
        "verdict": ".venv/bin/kvtrial analyze 'results/c 1'",
        "report": ".venv/bin/kvtrial report 'results/c 1' --lang ru --history h.json",
    }
    secret = msgspec.structs.replace(campaign, command=[*campaign.command, "-e", "password=REDACTED"])
    assert commands_of(tmp_path, secret, [], "en", [])["campaign"].endswith("\n# put back what says REDACTED")


def bare_campaign() -> Campaign:
    plan = Plan(schema_version="1.0", protocol=cast(Any, None), seed=7, hosts=[], estimates={})
    return Campaign(
        schema_version="1.0", campaign="c1", plan=plan, plan_sha256="x", pins={}, provenance={}, own_hit_share=None
    )


def test_a_campaign_outside_a_project_is_named_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = commands_of(tmp_path / "results" / "c1", bare_campaign(), [], "en", [])
    assert said["verdict"] == f".venv/bin/kvtrial analyze {tmp_path.resolve()}/results/c1"


def test_a_campaign_in_an_archive_is_unpacked_first(tmp_path: Path) -> None:
    (tmp_path / "experiment.yml").touch()
    own, other = tmp_path / "results" / "c1", tmp_path / "results" / "c2"
    archives = {own: Archive("docs/c1.tar.xz", "a/b c")}
    said = commands_of(own, bare_campaign(), [], "en", [], archives)
    unpack = "mkdir -p results/c1 && tar -xJf docs/c1.tar.xz -C results/c1 --strip-components=2 'a/b c'"
    assert said["unpack"] == unpack
    other.mkdir(parents=True)
    archives[other] = Archive("docs/c2.tar.xz", "whole")
    said = commands_of(own, bare_campaign(), [], "en", ["--beside", str(other)], archives)
    assert said["unpack"].splitlines() == [
        unpack, "mkdir -p results/c2 && tar -xJf docs/c2.tar.xz -C results/c2 --strip-components=1 whole",
    ]  # fmt: skip
    assert said["report"] == ".venv/bin/kvtrial report results/c1 --lang en --beside results/c2"
