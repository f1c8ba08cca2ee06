"""What happens at N ranks: a step replayed from a profile and a machine file, without torch or MPI.

`Profile` says what one rank computes and what it has to send, `Machine` how ranks are connected,
`Exchange` how gradients travel; `predict` replays the step. Everything it says is simulated.
"""

from hpctrain.scaling.plan.advice import Advice, advise
from hpctrain.scaling.plan.collectives import Layout
from hpctrain.scaling.plan.exchange import Exchange, default_exchange
from hpctrain.scaling.plan.machine import Costs, Link, Machine
from hpctrain.scaling.plan.machine_files import find_machine, machine_names, write_machine
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
    "write_machine",
    "write_profile",
]
