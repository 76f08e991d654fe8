"""What all tests share: property tests judge results, never how long an example took."""

from hypothesis import HealthCheck, settings

settings.register_profile("psrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("psrl")
