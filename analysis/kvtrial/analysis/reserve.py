"""RAM of a host that must stay free: one rule for plan, check and observe; the role preflight counts the same."""

GIB = 2**30
LEAST_RESERVE_BYTES = 8 * GIB
RESERVE_PART = 10
"""One part in so many of the host's RAM."""


def ram_reserve(total_bytes: int, declared_bytes: int | None = None) -> int:
    """Bytes that must stay free: as declared for the host, else the larger of 8 GiB and a tenth of its RAM."""
    return declared_bytes if declared_bytes is not None else max(LEAST_RESERVE_BYTES, total_bytes // RESERVE_PART)
