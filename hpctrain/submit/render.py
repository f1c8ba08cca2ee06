"""From a request and a site to the text of a job script. Pure, but for reading the template."""

from __future__ import annotations

import re
from pathlib import Path

from hpctrain import __version__
from hpctrain.doctor.leftovers import NAMES
from hpctrain.exit_codes import DIED, REQUEUE
from hpctrain.submit.directives import write_directives
from hpctrain.submit.kinds import MANIFESTS
from hpctrain.submit.kubernetes import check_manifest, manifest_context, quote_json
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
    environment.filters["j"] = quote_json
    named = {"template_name": plan.template_name, "version": __version__}
    if plan.template_name in MANIFESTS:
        check_manifest(plan)
        template = environment.get_template(f"{plan.template_name}.yaml.j2")
        return template.render(named | manifest_context(plan))
    text = environment.get_template(f"{plan.template_name}.sh.j2").render(named | _context(plan))
    return re.sub(r"\n{3,}", "\n\n", text)


def _context(plan: Plan) -> dict[str, object]:
    request, site = plan.request, plan.site
    return {
        "died_code": DIED,
        "directives": write_directives(plan),
        "each_node": each_node_words(plan),
        "environment": plan.environment,
        "hints": _hints(plan),
        "image_options": _image_options(plan),
        "job_folders": _job_folders(plan),
        "launch": launch_words(plan),
        "modules": [*site.modules, *request.modules, *site.modules_after],
        "on_nodes": bool(request.stage or request.pack or request.prologue),
        "plan": plan,
        "rank_setup": _rank_setup(plan),
        "request": request,
        "requeue_code": REQUEUE,
        "restart_codes": plan.restart_codes,
        "shared_memory": [f"/dev/shm/{name}" for name, who in NAMES.items() if who != "hpctrain"],
        "signals": passed_signals(plan),
        "site": site,
        # A step may still hold a node that does not answer any more.
        "sweep_options": ["--overlap"] if plan.template.batch == "slurm" else [],
        "source": request.source,
    }


def _hints(plan: Plan) -> list[str]:
    """The site's, and that nothing was checked where the queue is none that the profile knows."""
    site, queue = plan.site, plan.queue
    if not site.queues or not queue or queue in site.queues:
        return list(site.hints)
    known = ", ".join(site.queues)
    return [
        *site.hints,
        f"nodes and walltime are not checked: the profile has limits of {known}, none of {queue}",
    ]


def _job_folders(plan: Plan) -> dict[str, str]:
    """Those of the site that the job does not name itself."""
    given = plan.request.environment
    return {name: path for name, path in plan.site.job_folders.items() if name not in given}


def _rank_setup(plan: Plan) -> str:
    """What a rank does before it becomes the command: make its folders, choose its GPU."""
    folders = " ".join(f'"${name}"' for name in _job_folders(plan))
    setup = [f"mkdir -p -- {folders}"] if folders else []
    local_rank = local_rank_variable(plan)
    if plan.gpus_per_node and plan.site.gpu_visibility in ("local-rank", "reversed"):
        index = f"${local_rank}"
        if plan.site.gpu_visibility == "reversed":
            index = f"$(({plan.gpus_per_node - 1} - {local_rank}))"
        setup.append(f"export {plan.site.gpu_variable}={index}")
    return "; ".join(setup)


def _image_options(plan: Plan) -> list[str]:
    vendor = {"CUDA_VISIBLE_DEVICES": "--nv", "ROCR_VISIBLE_DEVICES": "--rocm"}
    option = vendor.get(plan.site.gpu_variable) if plan.gpus_per_node else None
    return [*([option] if option else []), *plan.site.image_options]
