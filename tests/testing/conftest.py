"""The plugin's fixture, also where adadp was installed before it had one."""

from __future__ import annotations

from adadp.testing.plugin import adadp_influence  # noqa: F401 - a fixture
