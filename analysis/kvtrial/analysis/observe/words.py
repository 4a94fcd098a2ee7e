"""Numbers as people read them."""

from collections.abc import Sequence


def whole(value: float) -> str:
    """A count: `36,700,160,000`."""
    return f"{value:,.0f}"


def plural(value: float, one: str, many: str | None = None) -> str:
    """A count with its noun: `1 request`, `49 requests`."""
    return f"{whole(value)} {one if value == 1 else many or one + 's'}"


def signed_bytes(value: float) -> str:
    """A rise in bytes, exact: `+36,700,160,000 B`; nothing is `0 B`."""
    return f"+{value:,.0f} B" if value > 0 else f"{value:,.0f} B"


def percent(share: float) -> str:
    """A share from 0 to 1: `99.8 %`."""
    text = f"{100 * share:.1f}".removesuffix(".0")
    return f"{text} %"


def seconds(value: float) -> str:
    """A duration with three digits: `54.7 s`, `84 ms`."""
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def gigabytes_per_second(rate: float) -> str:
    """Bytes a second: `21.4 GB/s`."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e8 else f"{rate / 1e6:.1f} MB/s"


def span(values: Sequence[float], form: str = ",.0f") -> str:
    """`9-11`, or one number where all are equal."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}-{high}"


def listed(items: Sequence[str], most: int = 6) -> str:
    """`a, b and 3 more`."""
    shown = list(items[:most])
    rest = len(items) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")
