"""Hypothesis profiles: the default repeats the same examples, RATOON_HYPOTHESIS=thorough looks for new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

settings.register_profile("default", derandomize=True, max_examples=150, database=None, **_COMMON)
settings.register_profile("thorough", max_examples=5000, print_blob=True, **_COMMON)
settings.load_profile(os.environ.get("RATOON_HYPOTHESIS", "default"))
