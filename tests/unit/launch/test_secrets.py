"""A secret never gets into a plan, hence into no record, report or log."""

import pytest
from kvtrial.analysis.secrets import refuse_secrets
from kvtrial.record.errors import UnusableInput


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "VLLM_API_KEY", "HUGGING_FACE_HUB_TOKEN", "MY_CREDENTIALS"],
)
def test_environment_variables_with_a_secret_are_refused_by_name(name):
    with pytest.raises(UnusableInput, match=name):
        refuse_secrets("control", [], [name])


@pytest.mark.parametrize("name", ["api-key", "hf-token", "ssl-key-password"])
def test_options_with_a_secret_are_refused_by_name(name):
    with pytest.raises(UnusableInput, match=name):
        refuse_secrets("control", [name], [])


def test_tokens_that_are_counted_and_ordinary_names_are_not_secrets():
    refuse_secrets(
        "control",
        ["max-num-batched-tokens", "enable-prompt-tokens-details", "kv-transfer-config", "tokenizer", "block-size"],
        ["OMP_NUM_THREADS", "VLLM_HOST_IP", "GLIBC_TUNABLES", "VLLM_KV_CACHE_LAYOUT", "TOKENIZERS_PARALLELISM"],
    )
