"""A ladder's page, from the synthetic ladder that the tests of ladders use."""

import functools
import sys
from pathlib import Path

from kvtrial.analysis.prices import Prices
from kvtrial.analysis.report import build_brief, build_report
from kvtrial.analysis.verdict import conclude
from kvtrial.record.verdict import Verdict

_PATH = Path(__file__).parents[1] / "ladder"
if str(_PATH) not in sys.path:
    sys.path.append(str(_PATH))

from ladder_build import ladder_protocol, ladder_records  # noqa: E402

PRICES = Prices("EUR", gpu_hour=2.0, ram_gib_hour=0.01, replica_hour=1.5)


@functools.cache
def ladder_verdict(prices: Prices | None = None) -> Verdict:
    return conclude(ladder_protocol(), {"h1": ladder_records()}, "c1", prices=prices)


@functools.cache
def ladder_page(language: str = "en") -> str:
    return build_report(ladder_verdict(PRICES), ladder_protocol(), ladder_records(), {}, None, language=language)


def ladder_brief(prices: Prices | None = None, language: str = "en") -> str:
    return build_brief(ladder_verdict(prices), ladder_protocol(), ladder_records(), language=language, prices=prices)
