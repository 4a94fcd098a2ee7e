"""Makes the stand-in server importable, and declares the marker of the long fuzz."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long_fuzz: ten million random bytes; run with -m long_fuzz")
