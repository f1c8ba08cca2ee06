"""`hpctrain job sites`: the profiles there are, and how far each can be trusted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
from pathlib import Path

from hpctrain import log
from hpctrain.cli.job.options import site_folders
from hpctrain.errors import ConfigError
from hpctrain.submit import Site, find_sites, load_site

__all__ = ["add_arguments", "main"]

_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show all of one profile")
    parser.add_argument("--json", action="store_true", help="print them as JSON")


def main(args: argparse.Namespace) -> int:
    """List, or show one."""
    folders = site_folders()
    sites, broken = _load([args.name] if args.name else sorted(find_sites(folders)), folders)
    if args.name and broken:
        raise broken[0]
    if args.json:
        print(json.dumps([dataclasses.asdict(site) for site in sites], indent=2))
    elif args.name:
        print(_describe(sites[0]))
    else:
        headers = ("site", "template", "GPUs", "what", "ever run", "as of")
        print(log.table(headers, [_row(site) for site in sites], width=_WIDTH))
        print("\n`hpctrain job sites NAME` shows a whole profile, and its sources.")
    for error in broken:
        log.warn(str(error))
    return 2 if broken else 0


def _load(names: list[str], folders: list[Path]) -> tuple[list[Site], list[ConfigError]]:
    """Profiles, and what is wrong with those that cannot be used: one hides no other."""
    sites, broken = [], []
    for name in names:
        try:
            sites.append(load_site(name, folders))
        except ConfigError as error:
            broken.append(error)
    return sites, broken


def _row(site: Site) -> tuple[object, ...]:
    ever_run = "yes" if site.ever_run else "never"
    return site.name, site.template, site.gpus_per_node, site.title, ever_run, site.as_of


def _known(site: Site) -> str:
    if not site.source:
        return "never run; no source"
    how = "run on" if site.ever_run else "never run; written from"
    assumed = f"; assumed: {', '.join(site.assumed)}" if site.assumed else ""
    return f"{how} {site.source} ({site.as_of}){assumed}"


def _describe(site: Site) -> str:
    """One profile: each key and variable with its value, and where that is from."""
    pages = list(site.sources)
    origin = {key: f"[{1 + pages.index(page)}]" for page in pages for key in site.sources[page]}
    origin |= dict.fromkeys(site.assumed, "assumed")
    tables = ("environment", "multi_node_environment", "job_folders", "queues", "sources")
    rows = [("known", _known(site), "")]
    for entry in dataclasses.fields(site):
        value = getattr(site, entry.name)
        if entry.name not in tables and value not in ("", (), None):
            words = ", ".join(value) if isinstance(value, tuple) else value
            rows.append((entry.name, words, origin.get(entry.name, "")))
    for name in tables[:3]:
        for key, value in getattr(site, name).items():
            rows.append((f"{name}: {key}", value, origin.get(key, "")))
    for key, queue in site.queues.items():
        rows.append((f"queue {key}", queue.describe(), origin.get("queues", "")))
    drawn = log.table(("key", "value", "from"), rows, width=_WIDTH)
    wrapper = textwrap.TextWrapper(_WIDTH, subsequent_indent="    ", break_on_hyphens=False)
    notes = [wrapper.fill(f"[{n}] {page}") for n, page in enumerate(pages, start=1)]
    return "\n".join([drawn, *notes])
