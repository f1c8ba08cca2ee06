"""What a training is told: typed sections, read from TOML, checked at once. Pure, without torch."""

from __future__ import annotations

from hpctrain.train.config.parts import Averages, Data, Model, Optimizer, Schedule, Training
from hpctrain.train.config.reading import build_config, load_config, parse_config
from hpctrain.train.config.root import SECTIONS, Config, all_keys, to_toml
from hpctrain.train.config.running import Checkpoint, EngineChoice, Faults, Logging, Precision

__all__ = [
    "SECTIONS",
    "Averages",
    "Checkpoint",
    "Config",
    "Data",
    "EngineChoice",
    "Faults",
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
