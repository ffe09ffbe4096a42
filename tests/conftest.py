"""What holds for every test."""

from __future__ import annotations

from contextlib import suppress

# A machine with a GPU may have no more than its own tests need.
with suppress(ModuleNotFoundError):
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's matter. The rest is as it was: hypothesis has a profile for CI.
    settings.register_profile("kvortex", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("kvortex")
