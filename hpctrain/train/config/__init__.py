"""The configuration of a training: typed sections, read from TOML. Pure, without torch."""

from __future__ import annotations

from hpctrain.train.config.file import (
    SECTIONS,
    Config,
    all_keys,
    build_config,
    load_config,
    parse_config,
    to_toml,
)
from hpctrain.train.config.running import (
    Checkpoint,
    EngineChoice,
    Faults,
    GridChoice,
    Logging,
    Precision,
)
from hpctrain.train.config.sections import Averages, Data, Model, Optimizer, Schedule, Training

__all__ = [
    "SECTIONS",
    "Averages",
    "Checkpoint",
    "Config",
    "Data",
    "EngineChoice",
    "Faults",
    "GridChoice",
    "Logging",
    "Model",
    "Optimizer",
    "Precision",
    "Schedule",
    "Training",
    "all_keys",
    "build_config",
    "load_config",
    "parse_config",
    "to_toml",
]
