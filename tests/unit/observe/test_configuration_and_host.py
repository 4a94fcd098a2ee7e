"""What a launch and a host's facts add: sizes, exposure, hazards, what was left over; and that secrets stay out."""

import json

import pytest
from kvtrial.analysis.observe import observe
from kvtrial.analysis.observe.client import read_client
from kvtrial.analysis.observe.configuration import configuration_of_host, configuration_of_log, read_configuration
from kvtrial.analysis.observe.logs import read_log
from kvtrial.analysis.observe.report import lines_of
from kvtrial.record.errors import UnusableInput
from kvtrial.record.observed import (
    Gpu,
    HostFacts,
    Listener,
    ShmFile,
    read_host_facts,
    redacted_argv,
    redacted_env,
    redacted_text,
)
from planted import CASES, METRICS, classes, host, launch, page, pages

GIB = 2**30
OFFLOAD = (
    '{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_bytes_to_use":%d}}'
)
LOCAL = ("--host", "127.0.0.1")


def told(*argv: str, facts: HostFacts | None = None, version: str = "0.32.0", **env: str):
    return observe(configuration=launch(*argv, version=version, **env), facts=facts)


def test_both_interfaces_are_said_of_a_running_server_too():
    answer = told(*LOCAL, "--kv-offloading-size", "4", "--kv-transfer-config", OFFLOAD % (16 * GIB))
    assert answer.class_ == "mixed_interfaces"
    assert answer.verdict == "report"
    assert "mixed_interfaces" not in classes(told(*LOCAL, "--kv-transfer-config", OFFLOAD % (16 * GIB)))


def test_a_bind_that_others_reach_is_named_with_the_routes_that_no_key_guards():
    open_ = told("--host", "0.0.0.0", "--api-key", "x")
    finding = next(f for f in open_.findings if f.class_ == "routable_bind")
    assert "/invocations" in finding.reason and "/v1, /v2, /inference, /cohere only" in finding.reason
    assert "routable_bind" not in classes(told(*LOCAL))


@pytest.mark.parametrize(("version", "guards"), [("0.20.2", "/v1 only"), ("0.24.0", "/v1, /v2, /inference only")])
def test_what_a_key_guards_follows_from_the_version(version: str, guards: str):
    found = told("--host", "0.0.0.0", "--api-key", "x", version=version).findings
    assert guards in next(f for f in found if f.class_ == "routable_bind").reason


def test_the_listening_sockets_outrank_the_command_line():
    behind = host(listening=[Listener("127.0.0.1", 8000)])
    assert "routable_bind" not in classes(told("--host", "0.0.0.0", facts=behind))
    wide = host(listening=[Listener("0.0.0.0", 8000)])
    assert "routable_bind" in classes(told("--host", "localhost", facts=wide))
    assert "routable_bind" not in classes(told("--host", "localhost", facts=host(listening=[Listener("::1", 8000)])))


def test_development_endpoints_beyond_loopback():
    answer = told("--host", "0.0.0.0", VLLM_SERVER_DEV_MODE="1")
    assert "dev_mode_exposed" in classes(answer)
    assert "dev_mode_exposed" not in classes(told(*LOCAL, VLLM_SERVER_DEV_MODE="1"))


@pytest.mark.parametrize(
    ("facts", "class_"),
    [
        ({"shm_files": [ShmFile("/dev/shm/vllm_offload_1.mmap", 8 * GIB, False)]}, "shm_left_over"),
        ({"dev_shm_total_bytes": 64 * 2**20}, "dev_shm_too_small"),
        ({"cgroup_limit_bytes": 17 * GIB}, "cgroup_limit_near"),
        ({"ram_total_bytes": 64 * GIB, "ram_available_bytes": 3 * GIB}, "ram_short"),
        ({"gpus": [Gpu("NVIDIA H200", other_bytes=30 * GIB)]}, "gpu_shared"),
        ({"cgroup_oom_kills": 2}, "out_of_memory_cgroup_limit"),
        ({"kernel_lines": ["Out of memory: Killed process 4 (vllm)"]}, "out_of_memory_kernel_oom_killer"),
    ],
)
def test_what_a_hosts_memory_shows(facts: dict, class_: str):
    assert class_ in classes(told(*LOCAL, "--kv-offloading-size", "16", facts=host(**facts)))


def test_a_host_with_room_is_quiet():
    facts = host(
        dev_shm_total_bytes=64 * GIB,
        cgroup_limit_bytes=120 * GIB,
        ram_total_bytes=128 * GIB,
        ram_available_bytes=60 * GIB,
        shm_files=[ShmFile("/dev/shm/vllm_offload_1.mmap", 16 * GIB, True)],
        gpus=[Gpu("NVIDIA H200", other_bytes=0)],
        cgroup_oom_kills=0,
    )
    argv = (*LOCAL, "--kv-cache-memory-bytes", str(4 * GIB), "--kv-offloading-size", "16")
    assert classes(told(*argv, facts=facts)) == []


def test_the_host_is_told_in_one_line_as_far_as_it_is_known():
    facts = host(
        host="gpu-1",
        driver_version="580.95.05",
        gpus=[Gpu("NVIDIA H200", 140 * GIB, 98 * GIB)],
        ram_total_bytes=128 * GIB,
        ram_available_bytes=60 * GIB,
    )
    said = lines_of(told(*LOCAL, facts=facts))
    assert (
        said[1] == "host gpu-1: driver 580.95.05, NVIDIA H200 98.0 of 140.0 GiB used, RAM 60.0 of 128.0 GiB available"
    )
    assert not any(line.startswith("host") for line in lines_of(told(*LOCAL, facts=host())))


def test_hazards_are_those_of_this_very_version_and_configuration():
    argv = (*LOCAL, "--kv-transfer-config", OFFLOAD % (16 * GIB))
    here = {hazard.id: hazard for hazard in told(*argv, version="0.26.0").hazards}
    assert "preemption-cascade" in here and here["preemption-cascade"].state == "applies"
    guarded = {hazard.id: hazard for hazard in told(*argv, "--no-async-scheduling", version="0.26.0").hazards}
    assert guarded["preemption-cascade"].state == "guarded"
    assert "preemption-cascade" not in {h.id for h in told(*argv, version="0.31.0").hazards}
    assert "preemption-cascade" not in {h.id for h in told(*LOCAL, version="0.26.0").hazards}


def test_a_driver_below_the_wheels_need_is_found_by_the_hosts_facts():
    facts = host(argv=["/opt/v/bin/vllm", "serve", "m", *LOCAL], driver_version="570.86.10", vllm_version="0.26.0")
    answer = observe(configuration=configuration_of_host(facts), facts=facts)
    assert "driver_too_old" in classes(answer)


def test_secrets_are_redacted_in_every_form():
    argv = ["vllm", "serve", "m", "--api-key", "sk-1", "sk-2", "--hf-token=t", "--max-num-batched-tokens", "8192"]
    assert redacted_argv(argv) == [
        "vllm", "serve", "m", "--api-key", "<redacted>", "<redacted>", "--hf-token=<redacted>",
        "--max-num-batched-tokens", "8192",
    ]  # fmt: skip
    assert redacted_env({"VLLM_API_KEY": "x", "HF_TOKEN": "y", "VLLM_PORT": "1"}) == {
        "VLLM_API_KEY": "<redacted>",
        "HF_TOKEN": "<redacted>",
        "VLLM_PORT": "1",
    }
    unit = 'Environment=VLLM_API_KEY=abc\nEnvironment="HF_TOKEN=def"\nExecStart=vllm serve m --api-key ghi --port 1\n'
    shown = redacted_text(unit)
    assert shown is not None and not any(secret in shown for secret in ("abc", "def", "ghi"))
    assert "--port 1" in shown


def test_no_secret_of_a_configuration_reaches_the_answer(tmp_path):
    (tmp_path / "command.txt").write_text("VLLM_API_KEY=hidden1 vllm serve m --host 0.0.0.0 --api-key hidden2\n")
    configuration = read_configuration(tmp_path / "command.txt")
    said = str(observe(configuration=configuration, version="0.32.0"))
    assert "hidden" not in said


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("vllm serve some/model --port 8001\n", "some/model"),
        ("args: [some/model, --port, '8001']\nenv: {A: '1'}\nvllm_version: 0.31.0\n", "some/model"),
        ("/opt/venv/bin/python -m vllm.entrypoints.openai.api_server --model some/model --port 8001\n", "some/model"),
    ],
)
def test_a_launch_may_come_in_several_forms(text: str, model: str, tmp_path):
    (tmp_path / "launch").write_text(text)
    configuration = read_configuration(tmp_path / "launch")
    assert configuration.parsed.model == model
    assert configuration.parsed.text("port") == "8001"


def test_of_two_arms_the_one_that_the_page_shows_is_taken():
    path = CASES / "05-tier-smaller-than-gpu-kv" / "config.yml"
    assert "arm variant" in read_configuration(path, connector=True).source
    assert "arm control" in read_configuration(path, connector=False).source
    assert "arm control" in read_configuration(path, "control", connector=True).source
    with pytest.raises(UnusableInput, match="has no arm 'other'"):
        read_configuration(path, "other")


def test_a_configuration_beside_pages_says_how_large_the_tier_is():
    path = CASES / "05-tier-smaller-than-gpu-kv" / "config.yml"
    both = {"connector": True, "version": "0.28.0", "cache": {"kv_cache_size_tokens": "187232"}}
    texts = [page(prompt=n * 1e5, store=n * 1e9, asked=n * 1e5, finished=n, **both) for n in (1, 2)]
    answer = observe(pages(*texts), configuration=read_configuration(path), version="0.28.0")
    assert answer.class_ == "tier_smaller_than_gpu_kv"
    assert answer.findings[0].numbers["tier_tokens"] == 112347


def test_the_launch_that_a_log_prints_is_read():
    said = (
        "{'model_tag': 'm', 'kv_offloading_size': 4.0, 'enforce_eager': True, 'other': Some(a=1), "
        "'kv_transfer_config': KVTransferConfig(kv_connector='OffloadingConnector', kv_role='kv_both', engine_id='x', "
        "kv_connector_extra_config={'cpu_bytes_to_use': 1000})}"
    )
    configuration = configuration_of_log(said, "0.26.0")
    assert configuration is not None
    assert configuration.parsed.text("kv-offloading-size") == "4"
    assert configuration.parsed.options["enforce-eager"] is True
    assert configuration.parsed.kv_transfer == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1000},
    }
    assert configuration_of_log("{broken", "0.26.0") is None


def test_the_launch_of_a_real_log_is_read():
    log = read_log((METRICS.parent / "logs" / "vllm-0.26.0-h200-8b-offload.log").read_text())
    configuration = configuration_of_log(log.facts.non_default_args, log.version)
    assert configuration is not None and configuration.parsed.kv_transfer is not None
    assert configuration.parsed.kv_transfer["kv_connector"] == "OffloadingConnector"
    assert configuration.parsed.text("num-gpu-blocks-override") == "4096"


@pytest.mark.parametrize(
    "raw",
    [
        {"sent": 120, "completed": 100, "failed": 20},
        {"requests_sent": 120},
        {"total_requests": 120, "successful": 100, "cancelled": 20},
        {"requests": {"sent": 120, "completed": 118}},
        {"requests": [{}] * 120},
        {"completed": 100, "aborted": 20},
    ],
)
def test_what_a_client_sent_is_read_by_any_of_its_usual_names(raw, tmp_path):
    (tmp_path / "client.json").write_text(json.dumps(raw))
    assert read_client(tmp_path / "client.json").sent == 120


@pytest.mark.parametrize("text", ["{}", "[", '{"sent": "many"}', "null", "[]", '[{"sent": 5}]'])
def test_a_client_that_names_no_number_is_refused(text: str, tmp_path):
    (tmp_path / "client.json").write_text(text)
    with pytest.raises(UnusableInput):
        read_client(tmp_path / "client.json")


@pytest.mark.parametrize(
    ("raw", "named"),
    [
        ({"ram_total_bytes": -1}, "ram_total_bytes=-1"),
        ({"gpus": [{"name": "NVIDIA H200", "other_bytes": -5}]}, "gpus.0.other_bytes=-5"),
    ],
)
def test_a_host_with_less_than_nothing_is_refused(raw: dict, named: str, tmp_path):
    (tmp_path / "facts.json").write_text(json.dumps(raw))
    with pytest.raises(UnusableInput, match=f"{named} is below 0"):
        read_host_facts(tmp_path / "facts.json")


@pytest.mark.parametrize("name", ["chrome", "Isolated Web Co", "java"])
def test_another_process_that_the_kernel_killed_is_no_death_of_the_server(name: str):
    line = f"Out of memory: Killed process 4 ({name}) total-vm:9kB"
    answer = told(*LOCAL, facts=host(kernel_lines=[line]))
    assert classes(answer) == ["another_process_killed"]
    assert name in answer.findings[0].reason and "did not end by it" in answer.findings[0].reason
    both = told(*LOCAL, facts=host(kernel_lines=[line, "Out of memory: Killed process 5 (VLLM::EngineCor)"]))
    assert both.class_ == "out_of_memory_kernel_oom_killer" and name not in both.findings[0].reason


def test_facts_of_a_host_are_checked_and_redacted_on_reading(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps({"argv": ["vllm", "serve", "m", "--api-key", "s"], "env": {"VLLM_API_KEY": "s"}}))
    facts = read_host_facts(path)
    assert "s" not in facts.argv and facts.env["VLLM_API_KEY"] == "<redacted>"
    path.write_text(json.dumps({"ram_total_byte": 1}))
    with pytest.raises(UnusableInput, match="ram_total_byte"):
        read_host_facts(path)
    path.write_text(json.dumps({"schema_version": 2}))
    with pytest.raises(UnusableInput, match="newer than 1"):
        read_host_facts(path)


def test_a_server_that_answers_took_its_options_and_one_that_does_not_may_have_died_of_them():
    asked = launch("--wibble", "--num-gpu-blocks-override", "10", "--max-model-len", "4096")
    ends = {"unknown_option", "max_model_len_over_kv_cache"}
    assert ends <= set(classes(observe(configuration=asked)))
    running = observe(pages(*[page(version="0.32.0", running=1, finished=n, prompt=n, generated=n) for n in (1, 2)]),
                      configuration=asked)  # fmt: skip
    assert not ends & set(classes(running))
