"""From a request and a site to the text of a job script. Pure, but for reading the template."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain import __version__
from hpctrain.exit_codes import REQUEUE
from hpctrain.submit.directives import write_directives
from hpctrain.submit.launchers import (
    each_node_words,
    launch_words,
    local_rank_variable,
    passed_signals,
)
from hpctrain.submit.places import JOBS
from hpctrain.submit.plan import Plan, make_plan
from hpctrain.submit.request import Request
from hpctrain.submit.site import Site
from hpctrain.submit.words import quote, quote_all

__all__ = ["render", "render_plan"]


def render(request: Request, site: Site, *, templates: Path = JOBS / "templates") -> str:
    """Write the script.

    Raises:
        ConfigError: the request and the site do not go together.
    """
    return render_plan(make_plan(request, site), templates=templates)


def render_plan(plan: Plan, *, templates: Path = JOBS / "templates") -> str:
    """Write the script of a plan.

    Args:
        plan: What is to be in it.
        templates: The folder of the templates.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        autoescape=False,  # bash, not HTML: every value goes through quote
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["q"] = quote
    environment.filters["qa"] = quote_all
    text = environment.get_template(f"{plan.template_name}.sh.j2").render(_context(plan))
    return re.sub(r"\n{3,}", "\n\n", text)


def _context(plan: Plan) -> dict[str, object]:
    request, site = plan.request, plan.site
    return {
        "directives": write_directives(plan),
        "each_node": each_node_words(plan),
        "environment": plan.environment,
        "image_options": _image_options(plan),
        "launch": launch_words(plan),
        "modules": [*site.modules, *request.modules],
        "on_nodes": bool(request.stage or request.pack or request.prologue),
        "plan": plan,
        "rank_setup": _rank_setup(plan),
        "request": request,
        "requeue_code": REQUEUE,
        "signals": passed_signals(plan),
        "site": site,
        "source": request.source,
        "template_name": plan.template_name,
        "version": __version__,
    }


def _rank_setup(plan: Plan) -> str:
    """What a rank does to itself before it becomes the command: choose its GPU."""
    local_rank = local_rank_variable(plan)
    if plan.gpus_per_node and plan.site.gpu_visibility in ("local-rank", "reversed"):
        index = f"${local_rank}"
        if plan.site.gpu_visibility == "reversed":
            index = f"$(({plan.gpus_per_node - 1} - {local_rank}))"
        return f"export {plan.site.gpu_variable}={index}"
    return ""


def _image_options(plan: Plan) -> list[str]:
    vendor = {"CUDA_VISIBLE_DEVICES": "--nv", "ROCR_VISIBLE_DEVICES": "--rocm"}
    option = vendor.get(plan.site.gpu_variable) if plan.gpus_per_node else None
    return [*([option] if option else []), *plan.site.image_options]
