"""For all tests: how fast the machine happens to be decides nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvtrial", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtrial")
