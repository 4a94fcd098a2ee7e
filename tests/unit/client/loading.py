"""Send a load and look at what it left."""

from dataclasses import dataclass
from typing import Any

from kvtrial.host.client import run_load_blocking
from kvtrial.record.load import HonestyCard, LoadOutcome, LoadSpec, RequestResult, RequestSpec


@dataclass(frozen=True)
class Loaded:
    """What a load left: its results in the order of the specification, and the rest of the outcome."""

    results: list[RequestResult]
    outcome: LoadOutcome

    @property
    def card(self) -> HonestyCard:
        return self.outcome.card


def spec_for(server_url: str, concurrency: int | None = 1, **fields: Any) -> LoadSpec:
    limits = {"idle_timeout_seconds": 20, "request_timeout_seconds": 30, "deadlock_seconds": 30}
    return LoadSpec(base_url=server_url, model="m", concurrency=concurrency, **(limits | fields))


def load(server_url: str, wanted: list[RequestSpec], concurrency: int | None = 1, **fields: Any) -> Loaded:
    limits = {name: fields.pop(name) for name in list(fields) if name.endswith("_seconds")}
    found: dict[str, RequestResult] = {}

    def take(result: RequestResult) -> None:
        assert result.key not in found, "one result for each request"
        found[result.key] = result

    outcome = run_load_blocking(spec_for(server_url, concurrency, **limits), wanted, take, **fields)
    assert outcome.sent == len(wanted) == len(found)
    return Loaded([found[request.key] for request in wanted], outcome)
