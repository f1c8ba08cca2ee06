"""Where templates and site profiles are, and where hpctrain remembers jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["JOBS", "state_home", "user_sites"]

JOBS = Path(__file__).parent / "jobs"
"""`jobs/` of the checkout, or its copy inside the installed package."""


def user_sites(environ: Mapping[str, str]) -> Path:
    """The folder for the user's site profiles."""
    return _home(environ, "XDG_CONFIG_HOME", ".config") / "hpctrain" / "sites"


def state_home(environ: Mapping[str, str]) -> Path:
    """The folder where submitted jobs are remembered."""
    return _home(environ, "XDG_STATE_HOME", ".local/state") / "hpctrain"


def _home(environ: Mapping[str, str], variable: str, fallback: str) -> Path:
    given = environ.get(variable, "")
    return Path(given) if given.startswith("/") else Path.home() / fallback
