"""What happens at N ranks: a step replayed from a profile and a machine file, without torch or MPI.

`Profile` says what one rank computes and what it has to send, `Machine` how ranks are connected,
`Exchange` how gradients travel; `predict` replays the step. Everything it says is simulated.
"""

from hpctrain.predict.advice import Advice, advise
from hpctrain.predict.collectives import Layout
from hpctrain.predict.exchange import Exchange, default_exchange
from hpctrain.predict.machine import Costs, Link, Machine
from hpctrain.predict.machine_files import find_machine, machine_names, write_machine
from hpctrain.predict.prediction import Prediction, predict
from hpctrain.predict.profile import Layer, Profile, read_profile, write_profile

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
