"""What an arm or an inventory can't ask of the engine is refused in one sentence, before anything starts."""

import pytest
import yaml
from test_plan import ROOT, plan, refusal


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"hos": "0.0.0.0"}, "--hos is an abbreviation, which vLLM would take for --host"),
        ({"kv_offloading_siz": 4}, "for --kv-offloading-size"),
        ({"api-ke": "S3CRET"}, "for --api-key"),
        ({"no-async-sched": True}, "for --no-async-scheduling"),
        ({"conf": "/x.yml"}, "for --config"),
        ({"HOST": "0.0.0.0"}, "'--HOST' is no name of an option"),
        ({"host=0.0.0.0": True}, "'--host=0.0.0.0' is no name of an option"),
        ({"enforce-eager": "--host=0.0.0.0"}, "a value that starts with a dash for an option of its own"),
        ({"lora-modules": ["a=b", "--uds=/x"]}, "a value that starts with a dash"),
        ({"host": "0.0.0.0"}, "option --host='0.0.0.0' can't be used: the engine listens on 127.0.0.1 alone"),
        ({"host.x": 1}, "the engine listens on 127.0.0.1 alone"),
        ({"port": 1}, "it is set by kvtrial_port"),
        (
            {"config": "/x.yml"},
            "option --config='/x.yml' can't be used: what stands in such a file is seen by no check",
        ),
    ],
    ids=str,
)
def test_options_that_an_inventory_can_not_set(args, said):
    sentence = refusal(engine_args=args)
    assert said in sentence
    assert "S3CRET" not in sentence


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"swap-space": 4}, "--swap-space is not an option of vLLM"),
        ({"wibble": True}, "--wibble is not an option of any vLLM version that kvtrial knows"),
    ],
    ids=str,
)
def test_options_that_the_version_does_not_have(args, said):
    assert said in refusal(engine_args=args)


def test_options_and_values_that_it_can():
    argv = plan(engine_args={"host": "127.0.0.1", "max_logprobs": -1}).hosts[0].launches["control"].argv
    assert argv.count("--host") == 1
    assert argv[argv.index("--max-logprobs") + 1] == "-1"


def protocol_with(tmp_path, **offload):
    """offload_return with more in its arm `offload`."""
    protocol = yaml.safe_load((ROOT / "playbooks" / "protocols" / "offload_return.yml").read_text())
    for name, more in offload.items():
        protocol["arms"]["offload"].setdefault(name, {}).update(more)
    (tmp_path / "mine.yml").write_text(yaml.safe_dump(protocol, sort_keys=False))
    return str(tmp_path / "mine.yml")


def test_an_abbreviation_in_an_arm_of_a_protocol(tmp_path):
    assert "arm offload: --por is an abbreviation" in refusal(protocol=protocol_with(tmp_path, args={"por": 1}))


def test_an_address_in_an_arm_or_in_the_inventory_is_refused_rather_than_overruled(tmp_path):
    said = refusal(protocol=protocol_with(tmp_path, env={"VLLM_HOST_IP": "0.0.0.0"}))
    assert "arm offload: the engine would listen on VLLM_HOST_IP=0.0.0.0, allowed is 127.0.0.1" in said
    assert "VLLM_HOST_IP=10.0.0.1" in refusal(engine_env={"VLLM_HOST_IP": "10.0.0.1"})


@pytest.mark.parametrize("name", ["A B=", "", "1A", "A-B", "A=B"])
def test_a_name_that_no_environment_variable_has(name):
    assert f"{name!r} is no name of an environment variable" in refusal(engine_env={name: "1"})


def test_a_nul_in_the_environment():
    assert "env.A holds a NUL" in refusal(engine_env={"A": "a\0b"})


@pytest.mark.parametrize("size", [10**26, 2**50 + 1, -5])
def test_a_tier_that_no_host_has(size):
    assert f"cpu_bytes_to_use={size} is no size of a CPU tier: those have 1 to {2**50} bytes" in refusal(
        sizes={"tier_bytes": size}
    )


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_spec_of_nobody(backend):
    config = {"spec_name": "HostOffloadingSpec", "spec_module_path": None}
    sentence = refusal(backend=backend, connector_extra_config=config)
    assert "spec_name='HostOffloadingSpec' is no spec of vLLM 0.32.0, which has CPUOffloadingSpec and Tier" in sentence
    assert "give spec_module_path" in sentence


def test_secrets_in_values():
    proxy = {"HTTPS_PROXY": "http://u:S3CRET@h:1"}
    for changes in ({"engine_env": proxy}, {"engine_args": {"tokenizer": "https://S3CRET@h/x"}}):
        sentence = refusal(**changes)
        assert "holds an address with a user or password" in sentence
        assert "S3CRET" not in sentence
