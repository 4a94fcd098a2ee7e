"""Every data file fits its type, and what it states is consistent with itself."""

import re
from pathlib import Path

import kvtrial.record
import msgspec
import pytest
import yaml
from kvtrial.analysis.check_connector import KeyTable
from kvtrial.analysis.check_host import CudaTable
from kvtrial.analysis.launch_arm import ModelTable
from kvtrial.record.admission import AdmissionTable, admission
from kvtrial.record.enginelog import CauseTable, FactTable
from kvtrial.record.errors import UnusableInput
from kvtrial.record.exposition import MetricTable
from kvtrial.record.hazards import HazardTable, Watch
from kvtrial.record.launchfacts import ConsequenceTable
from kvtrial.record.options import OptionTable
from kvtrial.record.serveoptions import serve_options
from kvtrial.record.versions import cuda_of_local_version, data, minor, outside_read_range, release, within

TABLES = {
    "admission": AdmissionTable,
    "metrics": MetricTable,
    "hazards": HazardTable,
    "connector_keys": KeyTable,
    "options": OptionTable,
    "consequences": ConsequenceTable,
    "log_facts": FactTable,
    "log_causes": CauseTable,
    "models": ModelTable,
    "cuda": CudaTable,
}
FOLDER = Path(kvtrial.record.__file__).parent / "data"
OURS = [FOLDER / f"{name}.yml" for name in TABLES]


@pytest.mark.parametrize(("name", "shape"), TABLES.items())
def test_data_file_fits_its_type(name, shape):
    assert isinstance(data(name, shape), shape)


@pytest.mark.parametrize(("name", "shape"), TABLES.items())
def test_an_unknown_key_in_a_data_file_is_refused(name, shape):
    content = yaml.safe_load((FOLDER / f"{name}.yml").read_text()) | {"surprise": 1}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(content, shape)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_since_lies_before_until_everywhere(path):
    def spans(node):
        if isinstance(node, dict):
            if "since" in node or "until" in node:
                yield node.get("since"), node.get("until")
            for inner in node.values():
                yield from spans(inner)
        elif isinstance(node, list):
            for inner in node:
                yield from spans(inner)

    for since, until in spans(yaml.safe_load(path.read_text())):
        for bound in (since, until):
            assert bound is None or (isinstance(bound, str) and release(bound)), (
                f"{bound!r} must be a version in quotes"
            )
        assert since is None or until is None or release(since) < release(until)


def test_the_sources_of_a_role_never_overlap():
    for role, entry in data("metrics", MetricTable).values.items():
        for number in range(11, 34):
            holding = [source for source in entry.sources if within(f"0.{number}.0", source.since, source.until)]
            assert len(holding) <= 1, (role, number)


def test_hazards_have_unique_ids_and_valid_expressions_and_guards_where_the_action_is_guard():
    hazards = data("hazards", HazardTable).hazards
    assert len({hazard.id for hazard in hazards}) == len(hazards)
    for hazard in hazards:
        assert (hazard.action == "guard") == (hazard.guard is not None), hazard.id
        for pattern in hazard.watch.log:
            re.compile(pattern)
    watched_by_nothing = {h.id for h in hazards if h.action == "watch" and h.about == "defect" and h.watch == Watch()}
    assert watched_by_nothing == set()


def test_the_catalogue_is_large_and_every_entry_says_what_to_do_and_where_it_was_read():
    hazards = data("hazards", HazardTable).hazards
    assert len(hazards) >= 50
    for hazard in hazards:
        assert hazard.do.endswith("."), hazard.id
        assert re.search(r"#\d+|read in|security\.md|usage\.md", hazard.source), hazard.id
        assert "://" not in hazard.source, hazard.id


ROLES_OF_PAGES = set(data("metrics", MetricTable).values)
OF_LAUNCHES = {"connector", "stock_spec", "tier_bytes", "both_interfaces", "load_failure_policy", "async_scheduling",
               "loopback", "api_key", "backend", "gpu_kv_bytes", "kv_cache_groups", "window_seconds"}  # fmt: skip
OF_HOSTS = {"dev_shm_total_bytes", "shm_files_left_over", "ram_total_bytes"}
DERIVED = {"requests_finished", "requests_unfinished", "local_hit_share"}


def test_conditions_name_only_facts_that_there_are():
    """A misspelt fact is never known, so its condition would never hold and nobody would see it."""
    for hazard in data("hazards", HazardTable).hazards:
        for condition in [*hazard.configurations, *hazard.watch.facts]:
            for name, wanted in condition.items():
                bounds = [getattr(wanted, part, None) for part in ("above", "below", "at_least", "at_most")]
                for named in [name, *(bound for bound in bounds if isinstance(bound, str))]:
                    space, _, rest = named.partition(".")
                    known = {"now": ROLES_OF_PAGES, "before": ROLES_OF_PAGES, "delta": ROLES_OF_PAGES,
                             "derived": DERIVED, "host": OF_HOSTS}.get(space, {rest})  # fmt: skip
                    assert rest in known if rest else named in OF_LAUNCHES, (hazard.id, named)


def test_causes_name_only_groups_of_their_expression():
    for cause in data("log_causes", CauseTable).causes:
        groups = set(re.compile(cause.pattern).groupindex)
        named = set(re.findall(r"\{(\w+)\}", cause.cause + cause.fix)) - set(cause.differences)
        assert named <= groups, cause.id
        assert {name for pair in cause.differences.values() for name in pair} <= groups, cause.id


def test_wheels_cover_every_minor_version_once():
    for number in range(11, 34):
        assert sum(within(f"0.{number}.0", w.since, w.until) for w in data("cuda", CudaTable).wheels) == 1, number


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0.26.0", (0, 26, 0)),
        ("v0.32", (0, 32, 0)),
        ("0.31.1rc2.dev7+gf98d1fc49", (0, 31, 1)),
        ("0.32.0+cpu", (0, 32, 0)),
    ],
)
def test_versions_are_read_as_they_are_printed(text, numbers):
    assert release(text) == numbers


def test_a_bound_is_inclusive_below_and_exclusive_above():
    assert within("0.24.0", "0.24", "0.30")
    assert within("0.29.3", "0.24", "0.30")
    assert not within("0.30.0", "0.24", "0.30")
    assert not within("0.23.9", "0.24", "0.30")


def test_a_version_that_is_none_is_refused_in_a_sentence():
    with pytest.raises(UnusableInput, match="'latest' is not of the form"):
        release("latest")


def test_what_was_not_read_is_said():
    assert outside_read_range("0.32.0") is None
    assert "newer" in (outside_read_range("0.34.0") or "")
    assert "older" in (outside_read_range("0.10.2") or "")
    assert minor("0.26.3") == "0.26"
    assert cuda_of_local_version("0.26.0+cu129") == "12.9"
    assert cuda_of_local_version("0.26.0") is None


def test_every_option_that_no_prediction_knows_is_one_of_vllms():
    """One that is misspelled would be passed over in a launch."""
    options = serve_options().options
    names = {name.removeprefix("no-") if name not in options else name for name in admission().unpredicted}
    assert names <= options.keys(), names - options.keys()
