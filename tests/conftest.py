"""Settings that all tests share."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

# The models here are tiny: more threads only wait for each other.
torch.set_num_threads(1)

# The same examples on every machine and every day; `--hypothesis-profile=search` looks for new ones.
settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
)
settings.register_profile(
    "search", deadline=None, database=None, suppress_health_check=list(HealthCheck), max_examples=300
)
settings.load_profile("fixed")
