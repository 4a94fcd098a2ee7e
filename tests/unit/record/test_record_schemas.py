"""The JSON Schemas that ship are those of the code, and what is written validates against them."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
import yaml
from kvtrial.analysis.answerschemas import NAMES, schema_named
from kvtrial.record import record as record_module
from kvtrial.record.errors import UnusableInput
from kvtrial.record.schemas import json_schema
from kvtrial.record.version import SCHEMA_VERSION, refuse_newer

SHIPPED = Path(record_module.__file__).parent / "jsonschema"
PROTOCOLS = Path(__file__).parents[3] / "playbooks" / "protocols"


@pytest.mark.parametrize("name", NAMES)
def test_the_shipped_schema_is_the_codes(name):
    shipped = json.loads((SHIPPED / f"{name}.json").read_text())
    assert shipped == json.loads(json.dumps(schema_named(name))), f"write it anew: kvtrial schema {name}"


def test_the_shipped_protocol_validates_and_a_misspelt_one_does_not():
    schema = json_schema("protocol")
    protocol = yaml.safe_load((PROTOCOLS / "offload_return.yml").read_text())
    jsonschema.validate(protocol, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**protocol, "phasse": []}, schema)


def test_a_record_validates_against_its_schema():
    from build import honest_records

    for record in honest_records()[:2]:
        jsonschema.validate(msgspec.to_builtins(record), json_schema("record"))


@pytest.mark.parametrize("version", ["2.0", "10.1"])
def test_a_newer_major_is_refused_in_a_sentence(version):
    with pytest.raises(UnusableInput, match=version):
        refuse_newer(version, "record.json")


def test_a_newer_minor_is_read_and_nonsense_is_refused():
    major = SCHEMA_VERSION.split(".")[0]
    refuse_newer(f"{major}.99", "record.json")
    with pytest.raises(UnusableInput, match="must look like"):
        refuse_newer("new", "record.json")
