"""The texts of units: what systemd reads back is what the launch specification says."""

import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.analysis.campaign import prepare
from kvtrial.host import givenback, units
from kvtrial.record.errors import UnusableInput
from kvtrial.record.plan import HostPlan
from trial import request_for


@pytest.fixture
def plan(tmp_path):
    request = request_for(tmp_path, engine_env={"ODD": 'a "b" $HOME %i \\', "VLLM_CACHE_ROOT": "/var/lib/x/cache"})
    prepared = prepare({**request, "pairs": 2})
    return msgspec.json.decode(Path(prepared["plans"]["h1"]).read_bytes(), type=HostPlan)


def unescaped(word: str, command: bool) -> str:
    """What systemd makes of a quoted word: C escapes, then specifiers, then (in commands) variables."""
    assert word.startswith('"')
    assert word.endswith('"')
    text = word[1:-1].encode().decode("unicode_escape").encode("latin-1").decode()
    assert "%" not in text.replace("%%", "")
    text = text.replace("%%", "%")
    if command:
        assert "$" not in text.replace("$$", "")
        text = text.replace("$$", "$")
    return text


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), st.booleans())
def test_nothing_in_a_word_is_expanded(text, command):
    word = units.quoted(text, command)
    assert "\n" not in word
    assert unescaped(word, command) == text


def test_a_nul_is_refused():
    with pytest.raises(UnusableInput, match="NUL"):
        units.quoted("a\0b", True)


def test_a_drop_in_has_the_launchs_argv_and_environment(plan):
    for arm, launch in plan.launches.items():
        lines = units.drop_in(plan, arm).splitlines()
        command = next(line for line in lines if line.startswith("ExecStart=") and line != "ExecStart=")
        words = [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(command.partition("=")[2])]
        assert words == launch.argv
        given_env = dict(
            unescaped(line.partition("=")[2], False).split("=", 1) for line in lines if line.startswith("Environment=")
        )
        assert given_env == units.environment(launch.argv, launch.env, "/tmp")
        other = next(name for name in plan.launches if name != arm)
        assert f"Conflicts=kvtrial-engine@{other}.service" in lines
        assert "BindsTo=kvtrial-host.service" in lines
        assert 'ReadWritePaths="-/var/lib/x/cache"' in lines
        assert f"TimeoutStopSec={plan.limits.stop_timeout_seconds:.0f}" in lines


def test_an_engine_is_kept_off_the_clients_cpus_where_they_are_named(plan):
    for asked in ("auto", "none"):
        assert "CPUAffinity" not in units.drop_in(msgspec.structs.replace(plan, client_cpus=asked), "control")
    for arm in plan.launches:
        text = units.drop_in(msgspec.structs.replace(plan, client_cpus="0,14-15"), arm)
        assert "CPUAffinity=1-13,16-1023" in text.splitlines()


def test_the_rule_for_sudo_names_whole_commands_only(plan):
    rule = units.sudo_rule(plan.launches)
    assert rule.count("\n") == 1
    assert rule == (
        "kvtrial ALL=(root) NOPASSWD: /usr/bin/systemctl start kvtrial-engine@control.service, "
        "/usr/bin/systemctl stop kvtrial-engine@control.service, /usr/bin/systemctl start "
        "kvtrial-engine@offload.service, /usr/bin/systemctl stop kvtrial-engine@offload.service\n"
    )
    assert "*" not in rule


@pytest.mark.parametrize("arm", ["a b", "a,b", "../x", "*", "a@b", "", "-x"])
def test_an_arm_that_can_name_no_unit_is_refused(arm):
    with pytest.raises(UnusableInput, match="can't name a systemd unit"):
        units.engine_unit(arm)


def test_a_program_is_started_as_a_unit_by_root_only(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(units.os, "geteuid", lambda: 1000)
    with pytest.raises(UnusableInput, match="takes root"):
        units.start_program(tmp_path, tmp_path, plan)


@pytest.mark.parametrize(
    ("before", "now", "files", "said"),
    [
        (None, None, [], ""),
        (2**30, 2**30 + 2**20, [], ""),
        (2**30, 2**33, [], "7516192768 bytes of GPU memory (before: 1073741824, now: 8589934592)"),
        (None, None, ["/dev/shm/vllm_offload_x"], "the memory of /dev/shm/vllm_offload_x"),
    ],
)
def test_memory_that_does_not_come_back_is_named(before, now, files, said):
    sentence = givenback.left_behind(before, now, files)
    assert sentence == (f"{said} did not come back after the engine's end" if said else "")
