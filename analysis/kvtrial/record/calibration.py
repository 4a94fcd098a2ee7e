"""A calibration of the load client on one host: how far its times were off against a server of known timing."""

import hashlib

import msgspec
from msgspec import Struct

CALIBRATION_SCHEMA = "1.0"
NOT_CALIBRATED = "the load client is not calibrated on"
"""How the caveat of a campaign without a calibration begins; the answer repeats it."""


class CalibrationLevel(Struct, frozen=True, kw_only=True):
    """What one number of streams gave. The TTFT error is the client's TTFT minus the server's, in seconds.

    Both begin with the request (the client: as it sends; the server: as the kernel has it) and end with the event of
    the first token (the client: as it reads; the server: as it writes). `cpu_us_per_chunk` and `client_cpu_share` are
    the client's CPU. `server_*`: what the server knows of its own error, microseconds; `write` is how uncertain its
    stamps are. `held`: every request was answered, and the error stayed within what a verdict can bear.
    """

    streams: int
    requests: int
    failed: int
    chunks: int
    chunks_per_second: float
    ttft_error_p50_seconds: float
    ttft_error_p99_seconds: float
    ttft_error_max_seconds: float
    dispatch_lag_p95_seconds: float | None
    cpu_us_per_chunk: float
    client_cpu_share: float
    server_write_p50_us: float
    server_write_p99_us: float
    server_lateness_p50_us: float
    server_lateness_p99_us: float
    held: bool


class CalibrationLimits(Struct, frozen=True, kw_only=True):
    """Up to where the calibration speaks: streams in flight, and chunks a second, of the largest level that held."""

    streams_max: int
    chunks_per_second_max: float


class CalibratedFor(Struct, frozen=True, kw_only=True):
    """What a calibration holds for: with any of these different it says nothing.

    `client_sha256` is over the sources of what runs on a host and the versions of the libraries that it reads with.
    `client_cpus` is what the inventory says of where the client runs (`kvtrial_client_cpus`).
    """

    kvtrial_version: str
    client_sha256: str
    kernel: str
    cpu_model: str
    python: str
    client_cpus: str = "auto"


class Calibration(Struct, frozen=True, kw_only=True):
    """The card that calibrating leaves. `calibration_id` is the sha256 of the card without it.

    `cpu_affinity`, `pinning`, `numa_node`: where the client ran meanwhile, as on its honesty card; the stamped server
    had the CPUs that an engine would have had.
    """

    schema_version: str
    calibration_id: str = ""
    made_at_utc: str
    seconds: float
    calibrated_for: CalibratedFor
    cpus: int
    clock_source: str | None
    governor: str | None
    load_average_1m: float
    steal_share: float | None
    levels: list[CalibrationLevel]
    limits: CalibrationLimits
    cpu_affinity: list[int] = []
    pinning: str | None = None
    numa_node: int | None = None


def with_id(card: Calibration) -> Calibration:
    """The card with its id."""
    bare = msgspec.structs.replace(card, calibration_id="")
    digest = hashlib.sha256(msgspec.json.encode(bare, order="sorted")).hexdigest()
    return msgspec.structs.replace(card, calibration_id=digest)
