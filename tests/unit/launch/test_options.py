"""What vLLM would take for another option than it looks like is refused, and nothing else is."""

import ast
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kvtrial.analysis.check import check_launches
from kvtrial.analysis.launch import OURS
from kvtrial.record.errors import UnusableInput
from kvtrial.record.hazards import all_hazards
from kvtrial.record.launch import parse_vllm_args
from kvtrial.record.launchfacts import consequence_table
from kvtrial.record.options import OptionTable, option_name, unclear_option
from kvtrial.record.versions import data

ROOT = Path(__file__).parents[3]
READ = data("options", OptionTable).read
OF_VLLM = [
    line
    for line in (ROOT / "tests" / "fixtures" / "options" / "vllm-0.32.0.txt").read_text().splitlines()
    if line.startswith("--")
]


@given(st.data())
def test_every_abbreviation_of_an_option_that_is_read_is_refused_with_the_whole_name(choose):
    whole = choose.draw(st.sampled_from([*READ, *(f"no-{name}" for name in READ)]))
    short = whole[: choose.draw(st.integers(1, len(whole)))]
    written = choose.draw(st.sampled_from([f"--{short}", f"--{short.replace('-', '_')}"]))
    complaint = unclear_option(written)
    if f"--{short}" in OF_VLLM or short in READ or short.removeprefix("no-") in READ or short == "kv-cache-memory":
        assert complaint is None
    else:
        assert complaint is not None
        assert ("abbreviation" in complaint) != short.endswith("-")


def test_the_whole_name_is_said():
    assert "--host " in str(unclear_option("--hos"))
    assert "--kv-offloading-size" in str(unclear_option("--kv_offloading_siz"))
    assert "--kv-transfer-config" in str(unclear_option("--kv-transfer-conf.kv_role"))
    assert "-tp" in str(unclear_option("-t"))


def test_no_option_of_vllm_is_taken_for_an_abbreviation():
    assert len(OF_VLLM) > 400
    assert [option for option in OF_VLLM if unclear_option(option)] == []
    assert unclear_option("-O3") is None
    assert unclear_option("--hf-overrides.rope_theta") is None


@pytest.mark.parametrize("written", ["--HOST", "--Host", "--", "--ho st", "--a--b", "--host "])
def test_a_name_in_another_form_is_refused(written):
    assert "is no name of an option" in str(unclear_option(written))


def test_other_names_of_an_option_are_that_option():
    parsed = parse_vllm_args(["m", "-asc", "4", "--device_memory_utilization=0.5", "--kv-cache-memory", "1G"])
    assert parsed.options == {
        "api-server-count": "4",
        "gpu-memory-utilization": "0.5",
        "kv-cache-memory-bytes": "1G",
    }
    assert parsed.unclear == []


@pytest.mark.parametrize(
    "given_", [["--hos", "0.0.0.0"], ["--hos=0.0.0.0"], ["--HOST", "0.0.0.0"], ["--api-ke", "S3CRET"]]
)
def test_a_launch_file_with_one_is_refused(given_):
    arms = {"control": {"args": ["m", "--host", "127.0.0.1", *given_]}}
    with pytest.raises(UnusableInput, match=f"Arm control: '?{given_[0].partition('=')[0]}") as refused:
        check_launches({}, {"version": "0.32.0"}, arms)
    assert "S3CRET" not in str(refused.value)


def test_a_record_with_one_is_read_all_the_same():
    assert parse_vllm_args(["m", "--max-num-seq", "4"]).options == {"max-num-seq": "4"}


def read_by_the_code():
    """Option names that the package asks a command line or an arm's arguments for, by the text of its code."""
    for path in (ROOT / "analysis" / "kvtrial").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            asked = None
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
                owner, asked = ast.unparse(node.func.value), node.args[0]
                if not (
                    (node.func.attr in ("text", "size") and owner.split(".")[-1] in ("parsed", "mine", "theirs"))
                    or (node.func.attr in ("text", "size") and "parse_vllm_args" in owner)
                    or (node.func.attr == "get" and (owner == "args" or owner.endswith((".options", "options"))))
                ):
                    asked = None
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("parsed.options"):
                asked = node.slice
            if isinstance(asked, ast.Constant) and isinstance(asked.value, str):
                yield asked.value


def test_the_list_has_every_option_that_something_reads():
    asked = set(read_by_the_code())
    assert {"host", "kv-offloading-size", "max-num-seqs", "block-size"} <= asked
    asked |= set(OURS) | {name for entry in consequence_table().of_options for name in entry.options}
    for hazard in all_hazards():
        when = yaml.safe_dump(getattr(hazard.when, "args_any", None) or [])
        asked |= {name.partition(">")[0] for name in yaml.safe_load(when)}
    assert asked - set(READ) == set()


def test_the_list_is_in_order_and_names_options_only():
    assert sorted(set(READ)) == READ
    assert {option_name(alias) for alias in data("options", OptionTable).aliases} <= set(READ)
