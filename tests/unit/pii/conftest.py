"""Hypothesis without clocks: the machines that run these tests are shared and busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
