"""Floor 4: the saver: a user's own loop that is never lost."""

from __future__ import annotations

from hpctrain.saver.saver import Restored, Saver

__all__ = ["Restored", "Saver"]
