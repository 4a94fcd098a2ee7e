"""A secret never gets into a plan, hence into no record, report or log."""

from pathlib import Path

import pytest
from kvtrial.analysis.secrets import refuse_secrets
from kvtrial.record.errors import UnusableInput

OF_VLLM = Path(__file__).parents[2] / "fixtures" / "options" / "vllm-0.32.0.txt"


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "VLLM_API_KEY", "HUGGING_FACE_HUB_TOKEN", "MY_CREDENTIALS",
        "GITHUB_PAT", "AUTHORIZATION", "PROXY_AUTH", "OPENAI_APIKEY", "SSL_PASSPHRASE", "GITHUBTOKEN", "SESSION_COOKIE",
    ],
)  # fmt: skip
def test_environment_variables_with_a_secret_are_refused_by_name(name):
    with pytest.raises(UnusableInput, match=name):
        refuse_secrets("control", {}, {name: "x"})


@pytest.mark.parametrize("name", ["api-key", "hf-token", "ssl-key-password"])
def test_options_with_a_secret_are_refused_by_name(name):
    with pytest.raises(UnusableInput, match=name):
        refuse_secrets("control", {name: "x"}, {})


@pytest.mark.parametrize(
    "value",
    [
        "http://u:S3CRET@h:1",
        "https://S3CRET@h",
        "socks5://u:p@S3CRET@h",
        ["a", "http://u:S3CRET@h"],
        {"in": {"it": "http://u:S3CRET@h"}},
        {"in": [{"api_key": "S3CRET"}]},
        {"headers": {"Authorization": "Bearer S3CRET"}},
    ],
    ids=str,
)
def test_a_secret_in_a_value_is_refused_and_not_said(value):
    with pytest.raises(UnusableInput, match="option --some-config") as refused:
        refuse_secrets("control", {"some-config": value}, {})
    assert "S3CRET" not in str(refused.value)
    if isinstance(value, str):
        with pytest.raises(UnusableInput, match="environment variable HTTPS_PROXY holds an address"):
            refuse_secrets("control", {}, {"HTTPS_PROXY": value})


def test_tokens_that_are_counted_and_ordinary_names_are_not_secrets():
    refuse_secrets(
        "control",
        {
            "max-num-batched-tokens": 1, "enable-prompt-tokens-details": True, "kv-transfer-config": {"kv_role": "b"},
            "tokenizer": "t", "block-size": 16, "hf-overrides": {"num_key_value_heads": 8, "pad_token_id": 0},
            "ssl-keyfile": "/k", "allowed-origins": ["http://a.example/x@y"],
        },
        {
            "OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1", "GLIBC_TUNABLES": "x", "VLLM_KV_CACHE_LAYOUT": "HND",
            "TOKENIZERS_PARALLELISM": "0", "LD_LIBRARY_PATH": "/x", "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD": "1",
            "HTTPS_PROXY": "http://proxy.example:3128",
        },
    )  # fmt: skip


def test_of_vllms_own_options_only_the_secret_ones_are():
    refused = []
    for option in OF_VLLM.read_text().splitlines():
        if not option.startswith("--") or option.startswith("--no-") or option == "--allow-credentials":
            continue
        try:
            refuse_secrets("control", {option[2:]: "x"}, {})
        except UnusableInput:
            refused.append(option)
    assert refused == ["--api-key", "--hf-token"]
    refuse_secrets("control", {"allow-credentials": True}, {})
