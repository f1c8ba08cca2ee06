"""What happens at N ranks: a step replayed from a profile and a machine file. Pure, no torch, no MPI.

`Profile` says what one rank computes and what it has to send, `Machine` how ranks are connected,
`Exchange` how gradients travel; `predict` replays the step. Everything it says is simulated.
"""

from hpctrain.scaling.plan.advice import Advice, advise
from hpctrain.scaling.plan.collectives import Layout
from hpctrain.scaling.plan.exchange import Exchange, default_exchange
from hpctrain.scaling.plan.machine import Costs, Link, Machine, find_machine, machine_names
from hpctrain.scaling.plan.prediction import Prediction, predict
from hpctrain.scaling.plan.profile import Layer, Profile, read_profile, write_profile

__all__ = [
    "Advice",
    "Costs",
    "Exchange",
    "Layer",
    "Layout",
    "Link",
    "Machine",
    "Prediction",
    "Profile",
    "advise",
    "default_exchange",
    "find_machine",
    "machine_names",
    "predict",
    "read_profile",
    "write_profile",
]
