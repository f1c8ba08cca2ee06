"""Floor 2: gradients in flat buffers, one message per bucket, no control messages."""

from __future__ import annotations

from hpctrain.fusion.arena import Arena
from hpctrain.fusion.layout import (
    CONTROL_WORDS,
    Bucket,
    ParameterSpec,
    cut_into_runs,
    is_dense,
    like_parameter,
    members_between,
    plan,
)
from hpctrain.fusion.usage import Arrived, Usage, Watcher, complete, hook_gradient, specs_of

__all__ = [
    "CONTROL_WORDS",
    "Arena",
    "Arrived",
    "Bucket",
    "ParameterSpec",
    "Usage",
    "Watcher",
    "complete",
    "cut_into_runs",
    "hook_gradient",
    "is_dense",
    "like_parameter",
    "members_between",
    "plan",
    "specs_of",
]
