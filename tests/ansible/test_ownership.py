"""Teardown removes what the project made and not a file more."""

import json
import os
import tempfile
from pathlib import Path

import pytest
from ansible_collections.kvtrial.vllm.plugins.module_utils import ownership, program_state

NOBODY = 65534
SHA = "0123456789ab"
OURS = {
    f"venvs/vllm-0.32.0-{SHA}/kvtrial-installed.json": {"lock_sha256": "1"},
    f"venvs/workload-{SHA}/kvtrial-installed.json": {"lock_sha256": "1"},
    f"models/made-{SHA}/manifest.json": {"schema_version": "1.0", "weights": "random"},
    f"models/given-{SHA}.manifest.json": {"schema_version": "1.0", "revision": "r", "files": {}},
    "campaigns/20260101-a/plan.json": {"schema_version": "1.0"},
    f"wheels/{SHA}/kvtrial-1-py3-none-any.whl": {},
    "cache/vllm/x": {},
    "calibration.json": {"schema_version": "1.0", "calibration_id": "c"},
}
FOREIGN = {
    f"venvs/vllm-0.32.0-{SHA[:11]}c/pyvenv.cfg": {},
    "venvs/mine/kvtrial-installed.json": {"lock_sha256": "1"},
    f"models/made-{SHA[:11]}c/manifest.json": {"schema_version": "1.0", "weights": "trained"},
    "models/llama/config.json": {},
    "models/notes.txt": {},
    "campaigns/mine/plan.json": {"what": "another plan"},
    f"wheels/{SHA[:11]}c/numpy-1-py3-none-any.whl": {},
    "cache/pip/x": {},
    "thesis.txt": {},
}


OTHER = "ba9876543210"
INTERRUPTED = {
    f"venvs/.vllm-0.33.0-{OTHER}.kvtrial": {"made_by": "kvtrial", "name": f"vllm-0.33.0-{OTHER}"},
    f"venvs/vllm-0.33.0-{OTHER}/lib/python3.11/site-packages/torch/half.so": {},
    f"venvs/.workload-{OTHER}.kvtrial": {"made_by": "kvtrial", "name": f"workload-{OTHER}"},
    f"models/.Qwen--Qwen3-0.6B-{OTHER}.kvtrial": {"made_by": "kvtrial", "name": f"Qwen--Qwen3-0.6B-{OTHER}"},
    f"models/Qwen--Qwen3-0.6B-{OTHER}.partial/model.safetensors.partial": {},
    f"models/.made-{OTHER}.kvtrial": {"made_by": "kvtrial", "name": f"made-{OTHER}"},
    f"models/.made-{OTHER}.abcd1234/part-00001.safetensors": {},
}
"""What a run that was cut off leaves."""
NOT_MARKED = {
    f"models/somebody--else-{SHA}.partial/model.safetensors": {},
    f"models/.upload-{SHA}.kvtrial": {"made_by": "another", "name": f"upload-{SHA}"},
    f"models/upload-{SHA}/config.json": {},
    "models/.mine.kvtrial": {"made_by": "kvtrial", "name": "mine"},
    "models/mine/config.json": {},
    f"venvs/.vllm-0.33.0-{SHA}.kvtrial": {"made_by": "kvtrial", "name": f"vllm-0.33.0-{OTHER}"},
    f"venvs/vllm-0.33.0-{SHA}/pyvenv.cfg": {},
}
"""Names as ours, and no mark, or one that is not ours or names something else."""


def plant(root: Path, files: dict) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(content))


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_a_purge_leaves_every_foreign_file_and_names_it(tmp_path, tools):
    state = tmp_path / "state"
    plant(state, OURS)
    plant(state, FOREIGN)
    settings = json.dumps({"kvtrial_state_dir": str(state), "kvtrial_purge": True})
    done = tools.run("ansible-playbook", "playbooks/teardown.yml", "-e", settings)
    assert done.returncode == 0, done.stdout
    assert files_in(state) == set(FOREIGN)
    for name in ("models/llama", "thesis.txt", "campaigns/mine"):
        assert str(state / name) in done.stdout


def test_what_an_interrupted_run_left_is_ours_and_goes(tmp_path):
    state = tmp_path / "state"
    plant(state, OURS | INTERRUPTED)
    (state / "campaigns" / "20260102-b").mkdir()
    (state / f"venvs/.vllm-0.34.0-{OTHER}.kvtrial").touch()
    ownership.remove(str(state), ownership.made_here(str(state)))
    assert not state.exists(), files_in(state)


def test_a_mark_owns_what_it_names_and_nothing_else(tmp_path):
    state = tmp_path / "state"
    plant(state, INTERRUPTED | NOT_MARKED)
    ownership.remove(str(state), ownership.made_here(str(state)))
    assert files_in(state) == set(NOT_MARKED)


def test_a_removal_that_was_interrupted_is_gone_on_with(tmp_path, monkeypatch):
    """What a thing is known by goes last: at every point, what is left is still known."""
    state = tmp_path / "state"
    plant(state, {name: text for name, text in OURS.items() if name.count("/") == 2} | INTERRUPTED)
    for name in ("venvs/vllm-0.32.0", f"models/made-{SHA}", "campaigns/20260101-a"):
        (folder,) = state.glob(f"{name}*")
        plant(folder, {"a/file": {}, "z": {}})
    rmtree, unlink = ownership.shutil.rmtree, ownership.os.unlink

    def dies(then):
        def once(path, *rest, **more):
            then(path, *rest, **more)
            raise KeyboardInterrupt

        return once

    interrupted = 0
    while state.exists():
        monkeypatch.setattr(ownership.shutil, "rmtree", dies(rmtree))
        monkeypatch.setattr(ownership.os, "unlink", dies(unlink))
        paths = ownership.made_here(str(state))
        assert paths, files_in(state)
        with pytest.raises(KeyboardInterrupt):
            ownership.remove(str(state), paths)
        interrupted += 1
        monkeypatch.undo()
        if not files_in(state):
            ownership.remove(str(state), ownership.made_here(str(state)))
    assert interrupted > 10


def test_a_purge_of_only_our_own_removes_the_directory(tmp_path):
    state = tmp_path / "state"
    plant(state, OURS)
    ownership.remove(str(state), ownership.made_here(str(state)))
    assert not state.exists()


def test_what_says_that_runs_were_fetched_goes_after_them(tmp_path, monkeypatch):
    """Else a removal that was cut off would be refused the next time: for runs that nobody fetched."""
    state = tmp_path / "state"
    plant(state, OURS | {"fetched/20260101-a.json": {"runs": {}}, "fetched/list.json": ["somebody's"]})
    gone, unlink, rmdir = [], ownership.os.unlink, ownership.os.rmdir
    monkeypatch.setattr(ownership.os, "unlink", lambda path, **more: (gone.append(path), unlink(path, **more)))
    monkeypatch.setattr(ownership.os, "rmdir", lambda path, **more: (gone.append(path), rmdir(path, **more)))
    ownership.remove(str(state), ownership.made_here(str(state)))
    folder, note = (str(state / name) for name in ("campaigns/20260101-a", "fetched/20260101-a.json"))
    assert gone.index(folder) < gone.index(note)
    assert files_in(state) == {"fetched/list.json"}
    assert ownership.left_in(str(state)) == [str(state / "fetched/list.json")]


def test_a_link_is_never_followed(tmp_path):
    state, elsewhere = tmp_path / "state", tmp_path / "elsewhere"
    plant(elsewhere, {"plan.json": {"schema_version": "1.0"}})
    (state / "campaigns").mkdir(parents=True)
    (state / "campaigns" / "link").symlink_to(elsewhere)
    assert ownership.made_here(str(state)) == []


@pytest.mark.parametrize("state_dir", ["", "/", "//", "/.", "a", "/a/..", "~/x"])
def test_what_is_no_directory_of_the_projects_own_is_refused(state_dir):
    assert "kvtrial_state_dir=" in ownership.refusal_of(state_dir)
    assert ownership.refusal_of("/var/lib/kvtrial/") == ""


@pytest.fixture
def folder_of_an_account():
    """(folder, file): a folder of an account, in which links to a file of root's lie where root is to write."""
    if os.geteuid() != 0:
        pytest.skip("only root can be led astray")
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        secret = Path(top) / "secret"
        secret.write_text("root's")
        secret.chmod(0o600)
        folder = Path(top) / "campaign"
        folder.mkdir()
        for name in ("consent", "heartbeat.tmp"):
            (folder / name).symlink_to(secret)
        os.chown(folder, NOBODY, NOBODY)
        Path(top).chmod(0o755)
        yield folder, secret


def test_a_link_that_an_account_planted_leads_root_nowhere(folder_of_an_account, tools):
    folder, secret = folder_of_an_account
    with pytest.raises(PermissionError):
        program_state.touch_heartbeat(str(folder))
    assert os.geteuid() == 0
    given = {"files": [{"path": str(folder / name), "text": "yes"} for name in ("plan.json", "consent")]}
    done = tools.run(tools.path("ansible"), "localhost", "-m", "kvtrial.vllm.text_files", "-a", json.dumps(given))
    assert done.returncode != 0
    assert f"{folder / 'consent'} can't be read or written" in done.stdout
    assert "root's" not in done.stdout and secret.read_text() == "root's"
    assert (folder / "plan.json").read_text() == "yes" and (folder / "plan.json").stat().st_uid == NOBODY
