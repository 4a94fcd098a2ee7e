"""Makes the stamped server and what the tests here share importable."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """What other tests left in memory isn't looked through by the collection before each phase here."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
