"""The history of a fleet: every campaign in one store of Parquet files, and what changed in it from night to night.

    store.add(STORE, results/CAMPAIGN)             one campaign into the store; twice is once
    reading.read(STORE) -> History                 nights, change points, noise floors, pooled nights

`History.changes` is a list of `ChangePoint`: host, night, metric, from_value, to_value, ratio, pins_changed, sentence.
The types are here; what needs pandas is imported by who uses it.
"""

from kvtrial.analysis.history.model import ALL_HOSTS, ChangePoint, History, NoiseFloor, PooledNights

__all__ = ["ALL_HOSTS", "ChangePoint", "History", "NoiseFloor", "PooledNights"]
