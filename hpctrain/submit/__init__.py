"""Floor 6: job scripts, their submission, and a linter for those written by hand.

Nothing here needs torch or MPI: a login node has neither.
"""

from __future__ import annotations

from hpctrain.submit.plan import Plan, make_plan
from hpctrain.submit.render import render
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site, load_site

__all__ = ["Plan", "Request", "Site", "load_site", "make_plan", "render"]
