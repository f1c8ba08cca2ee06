"""The recipes of CONTRIBUTING.md and docs/architecture.md name what is there."""

from __future__ import annotations

import ast
import configparser
import re
from importlib import import_module
from pathlib import Path

import pytest

import hpctrain
from hpctrain import batch_systems, checkpoint, engines
from hpctrain.batch_systems import registry as batch_registry
from hpctrain.checkpoint import stores
from hpctrain.engines import registry as engine_registry
from hpctrain.wire import registry as wire_registry

ROOT = Path(hpctrain.__file__).parents[1]
PAGES = ("CONTRIBUTING.md", "docs/architecture.md")
TOPS = ("hpctrain/", "jobs/", "mpi_tests/", "docs/", "benchmarks/")

pytestmark = pytest.mark.skipif(
    not (ROOT / "CONTRIBUTING.md").exists(), reason="needs the repository, not an installed package"
)


def quoted(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", (ROOT / page).read_text())


def resolve(name: str) -> object:
    """What a dotted name stands for: the longest module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", PAGES)
def test_the_files_that_a_page_names_are_there(page):
    paths = [word for word in quoted(page) if word.startswith(TOPS)]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_the_names_that_a_page_cites_are_there(page):
    names = [word for word in quoted(page) if re.fullmatch(r"hpctrain(\.\w+)+", word)]
    assert names
    groups = {engine_registry.GROUP, batch_registry.GROUP, stores.GROUP, wire_registry.GROUP}
    for name in set(names) - groups:
        resolve(name)


def test_the_entry_point_groups_are_those_of_the_code():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for group in (engine_registry.GROUP, batch_registry.GROUP, stores.GROUP, wire_registry.GROUP):
        assert f"`{group}`" in text


def test_the_seams_are_what_the_recipes_call_them():
    assert isinstance(engines.Engine, type)
    assert isinstance(batch_systems.BatchSystem, type)
    assert isinstance(checkpoint.CheckpointStore, type)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert links
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


def test_the_make_targets_are_there():
    targets = re.findall(r"^make ([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert len(targets) > 3
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []


def test_the_page_has_the_floors_of_the_import_contract():
    contract = configparser.ConfigParser()
    contract.read(ROOT / "setup.cfg")
    layers = contract["importlinter:contract:floors"]["layers"].strip().splitlines()
    text = (ROOT / "docs/architecture.md").read_text()
    table = text[text.index("| floor |") : text.index("Three rules")]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[2:] if line]
    assert rows == [[room.strip() for room in layer.split("|")] for layer in layers]


def literals() -> str:
    """All texts of the package, with what is filled in left out."""
    found = []
    for path in (ROOT / "hpctrain").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (str(p.value) if isinstance(p, ast.Constant) else "\0" for p in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_the_messages_that_the_readme_quotes_are_in_the_code():
    text = (ROOT / "README.md").read_text()
    table = text[text.index("| what you see |") :].split("\n\n")[0].splitlines()[2:]
    quotes = [quote for row in table for quote in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quotes) > 5
    said = literals()
    varying = r"\d[\d,]*|\.\.\.|\btorchrun\b|\bGPU\b|\branks?\b|\b(?:have|has)\b|\b\w+Error:"
    pieces = [piece.strip() for quote in quotes for piece in re.split(varying, quote)]
    assert [piece for piece in pieces if piece not in said] == []
