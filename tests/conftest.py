"""What all tests share: property tests judge results, never how long an example took.

The gate draws the same examples each time, so that it fails for what changed; the deep tier draws new ones.
"""

import pytest
from hypothesis import HealthCheck, settings


def pytest_configure(config: pytest.Config) -> None:
    for name, derandomize in (("gate", True), ("deep", False)):
        settings.register_profile(
            name, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=derandomize
        )
    settings.load_profile("gate" if config.getoption("markexpr") == "not deep" else "deep")
