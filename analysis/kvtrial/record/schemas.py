"""JSON Schemas of everything that is written for others; the files in jsonschema/ are made from here."""

from typing import Any

import msgspec

from kvtrial.record.load import RequestResult
from kvtrial.record.observed import HostFacts
from kvtrial.record.plan import HostPlan, Plan
from kvtrial.record.protocol import Protocol
from kvtrial.record.record import RunRecord
from kvtrial.record.verdict import Verdict
from kvtrial.record.version import SCHEMA_VERSION

SCHEMAS: dict[str, type] = {
    "protocol": Protocol,
    "plan": Plan,
    "host_plan": HostPlan,
    "record": RunRecord,
    "request": RequestResult,
    "verdict": Verdict,
    "host_facts": HostFacts,
}


def json_schema(name: str, shape: type | None = None) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one of SCHEMAS, or of another `shape`, with its version in the title."""
    schema = msgspec.json.schema(shape or SCHEMAS[name])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"kvtrial {name} {SCHEMA_VERSION}",
        **schema,
    }
