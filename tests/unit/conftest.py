"""Settings of hypothesis: no claim of these tests is one on time, and cores may be slow or busy."""

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
