"""Floor 2: gradients in flat buffers, one message per bucket, no control messages."""

from __future__ import annotations

from hpctrain.fusion.arena import Arena
from hpctrain.fusion.layout import Bucket, ParameterSpec, plan

__all__ = ["Arena", "Bucket", "ParameterSpec", "plan"]
