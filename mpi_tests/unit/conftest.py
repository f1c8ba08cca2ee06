"""Settings of hypothesis for all pure tests."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about a loaded machine than about the code.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")
