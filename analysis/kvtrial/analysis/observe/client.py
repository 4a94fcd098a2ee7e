"""What a load client says it sent. Clients name these things differently; the names are taken as they come."""

import json
from pathlib import Path
from typing import Any

import msgspec

from kvtrial.record.errors import UnusableInput

_NAMES: dict[str, tuple[str, ...]] = {
    "sent": (
        "sent",
        "requests_sent",
        "sent_requests",
        "num_sent",
        "submitted",
        "issued",
        "started",
        "attempted",
        "total_requests",
        "requests_total",
        "num_requests",
        "num_prompts",
        "request_count",
        "total",
    ),
    "completed": (
        "completed",
        "succeeded",
        "successful",
        "success",
        "ok",
        "finished",
        "requests_completed",
        "http_200",
    ),
    "failed": ("failed", "errors", "errored", "error", "failures", "requests_failed"),
    "aborted": (
        "aborted",
        "cancelled",
        "canceled",
        "disconnected",
        "incomplete",
        "client_aborted",
        "aborted_by_client",
        "requests_aborted",
        "closed_early",
        "dropped",
    ),
    "timed_out": ("timed_out", "timeouts", "timeout", "client_timeouts"),
}


class Client(msgspec.Struct, frozen=True):
    """Requests by what the client saw of them; None: it does not say. `prompt_tokens`: of all that were sent."""

    sent: float | None = None
    completed: float | None = None
    failed: float | None = None
    aborted: float | None = None
    timed_out: float | None = None
    prompt_tokens: float | None = None

    def outcomes(self) -> dict[str, float]:
        """What it says of the requests it sent, by its own words."""
        named = {
            "completed": self.completed,
            "failed": self.failed,
            "aborted": self.aborted,
            "timed out": self.timed_out,
        }
        return {name: value for name, value in named.items() if value is not None}


def read_client(path: Path) -> Client:
    """A client's JSON. Raises UnusableInput where it names no number of requests."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnusableInput(f"{path} can't be read ({error.strerror}); give an existing file.") from None
    except ValueError as error:
        raise UnusableInput(f"{path} is not JSON ({error}); give what the client sent as JSON.") from None
    if not isinstance(raw, dict):
        raise UnusableInput(
            f"{path} holds no mapping but {'a list' if isinstance(raw, list) else repr(raw)[:40]}; give a mapping with "
            "`sent`, and `completed`, `failed`, `aborted` where they are known."
        )
    found = _client_of(raw)
    if found.sent is None:
        raise UnusableInput(
            f"{path} names no number of requests sent; give a mapping with `sent`, and `completed`, `failed`, "
            "`aborted` where they are known."
        )
    return found


def _client_of(raw: dict[str, Any]) -> Client:
    flat = {str(key).lower(): value for key, value in raw.items()}
    for inner in raw.values():
        # Totals may stand one level down, beside the settings; what stands outside counts first.
        if isinstance(inner, dict):
            flat = {**{str(key).lower(): value for key, value in inner.items()}, **flat}
    values = {field: _number(flat, names) for field, names in _NAMES.items()}
    values["prompt_tokens"] = _number(flat, ("prompt_tokens", "prompt_tokens_sent", "total_input_tokens"))
    if values["sent"] is None:
        requests = flat.get("requests")
        parts = [values[name] for name in ("completed", "failed", "aborted", "timed_out")]
        known = [part for part in parts if part is not None]
        if isinstance(requests, list):
            values["sent"] = float(len(requests))
        elif isinstance(requests, int | float) and not isinstance(requests, bool):
            values["sent"] = float(requests)
        elif len(known) > 1:
            values["sent"] = sum(known)
    return Client(**values)


def _number(flat: dict[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = flat.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, list):
            return float(len(value))
    return None
