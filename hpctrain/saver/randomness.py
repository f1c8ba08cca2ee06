"""The random generators of one rank, as plain data for a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "restore"]


def capture(device: torch.device) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's global generators, and of this rank's device."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, keys, position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators as `capture` found them; a device's only where both runs have one."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
