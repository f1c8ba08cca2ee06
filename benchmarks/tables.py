"""Write the tables of README.md and docs/ from the results in benchmarks/results.

A page says where: whatever stands between `<!-- table: NAME -->` and `<!-- end -->` is replaced by
the tables of that benchmark, the newest result of each kind of machine. `--check` changes nothing
and fails where a page is not up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain import log
from hpctrain.bench import (
    ROOT,
    caption,
    command,
    file_name,
    markdown,
    parse_file_name,
    tables,
    upgrade,
    validate,
)
from hpctrain.errors import ConfigError

__all__ = ["fill", "main", "newest", "read_results"]

EXIT_STALE = 1
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_OPENING = re.compile(r"^<!-- table: ", re.MULTILINE)
_NOTHING = "No result has been committed yet.\n"


def newest(names: list[str]) -> dict[str, list[str]]:
    """By benchmark, the newest file of each machine, machines in order. Pure."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for name in names:
        parsed = parse_file_name(name)
        if parsed is not None:
            benchmark, date, machine = parsed
            key = (benchmark, machine)
            found[key] = max(found.get(key, ("", "")), (date, name))
    chosen: dict[str, list[str]] = {}
    for (benchmark, _), (_, name) in sorted(found.items()):
        chosen.setdefault(benchmark, []).append(name)
    return chosen


def read_results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The newest results by benchmark.

    Raises:
        ConfigError: a result is not what the schema says, or was not measured on a quiet machine.
    """
    results: dict[str, list[dict[str, Any]]] = {}
    for benchmark, names in newest([path.name for path in folder.glob("*.json")]).items():
        for name in names:
            result = upgrade(json.loads((folder / name).read_text()))
            wrong = validate(result)
            if not wrong and file_name(result) != name:
                wrong = [f"it belongs into {file_name(result)}"]
            if not wrong and result["num_noisy"]:
                wrong = [f"{result['num_noisy']} of its blocks were disturbed; measure again"]
            if wrong:
                raise ConfigError(f"benchmarks/results/{name}: {'; '.join(wrong)}")
            results.setdefault(benchmark, []).append(result)
    return results


def fill(page: str, results: Mapping[str, list[dict[str, Any]]]) -> str:
    """Replace what is between the marks of a page. Pure."""
    if len(_OPENING.findall(page)) != len(_MARKED.findall(page)):
        raise ConfigError("a mark `<!-- table: NAME -->` has no `<!-- end -->` after it")

    def write(match: re.Match[str]) -> str:
        texts = [_text(result) for result in results.get(match[2], [])]
        return match[1] + ("\n".join(texts) or _NOTHING) + match[4]

    return _MARKED.sub(write, page)


def _text(result: Mapping[str, Any]) -> str:
    parts = [markdown(table) for table in tables(result)]
    return "\n\n".join([caption(result), *parts]) + "\n"


def main() -> int:
    """Write the tables, or see whether they are up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if out of date")
    args = parser.parse_args()
    results = read_results(command.RESULTS)
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.read_text()
        filled = fill(page, results)
        if filled != page:
            stale.append(str(path.relative_to(ROOT)))
            if not args.check:
                path.write_text(filled)
    if stale:
        verb = "out of date; run python -m benchmarks.tables" if args.check else "written"
        log.notice(f"{', '.join(stale)}: {verb}")
    return EXIT_STALE if stale and args.check else 0


if __name__ == "__main__":
    sys.exit(command.run_main(main))
