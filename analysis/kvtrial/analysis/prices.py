"""What a configuration costs, from a user's own price list. Without one everything stays in resources. Pure."""

from msgspec import Struct

from kvtrial.record.errors import UnusableInput

SECONDS_PER_HOUR = 3600.0


class Prices(Struct, frozen=True, forbid_unknown_fields=True):
    """A user's prices per hour, in `currency`. `replica_hour`: what a replica takes beside its GPUs and RAM."""

    currency: str
    gpu_hour: float | None = None
    ram_gib_hour: float | None = None
    replica_hour: float | None = None


class Resources(Struct, frozen=True):
    """What one configuration occupies while it serves. `gpus` is 0 on a CPU engine: then a replica's price counts."""

    gpus: int
    ram_gib: float
    replicas: int


class Costs(Struct, frozen=True):
    """Money for what a level gave, in the list's currency; None where nothing was within the objective."""

    currency: str
    per_hour: float
    per_million_output_tokens: float | None
    per_request_within_objective: float | None


def refuse_prices(prices: Prices) -> None:
    """Raise UnusableInput for a list without a price, or with one below 0."""
    given = {
        name: price
        for name in ("gpu_hour", "ram_gib_hour", "replica_hour")
        if (price := getattr(prices, name)) is not None
    }
    if not prices.currency.strip():
        raise UnusableInput("kvtrial_prices names no currency; give one, such as EUR.")
    if not given:
        raise UnusableInput(
            "kvtrial_prices names no price; give currency and at least one of gpu_hour, ram_gib_hour and replica_hour."
        )
    for name, price in given.items():
        if not 0 <= price < 1e9:
            raise UnusableInput(f"kvtrial_prices: {name}={price} is no price; give a number from 0 to a billion.")


def lacks_price(prices: Prices, resources: Resources) -> str | None:
    """Which price a list lacks for an hour to have one, with what to do, without its full stop; None where it has all.

    GPUs must have a price where there are GPUs, and replicas where there are none; RAM without a price is taken to
    be in the price of its host.
    """
    if resources.gpus and prices.gpu_hour is None:
        return f"kvtrial_prices names no price of the {resources.gpus} GPUs in use; give gpu_hour"
    if not resources.gpus and prices.replica_hour is None:
        priced = (
            "that gpu_hour could be for" if prices.gpu_hour is not None else "and kvtrial_prices no price of a replica"
        )
        return f"this host has no GPU {priced}; give replica_hour"
    return None


def price_per_hour(prices: Prices, resources: Resources) -> float | None:
    """The price of an hour, None where the list lacks one that it takes (`lacks_price`)."""
    if lacks_price(prices, resources) is not None:
        return None
    return (
        resources.gpus * (prices.gpu_hour or 0.0)
        + resources.ram_gib * (prices.ram_gib_hour or 0.0)
        + resources.replicas * (prices.replica_hour or 0.0)
    )


def costs(
    prices: Prices, resources: Resources, tokens_per_second: float, requests_within_per_second: float
) -> Costs | None:
    """Cost of a level. `requests_within_per_second`: requests that kept the objective, over the level's seconds."""
    hour = price_per_hour(prices, resources)
    if hour is None:
        return None
    second = hour / SECONDS_PER_HOUR
    return Costs(
        currency=prices.currency,
        per_hour=hour,
        per_million_output_tokens=second / tokens_per_second * 1e6 if tokens_per_second > 0 else None,
        per_request_within_objective=second / requests_within_per_second if requests_within_per_second > 0 else None,
    )
