"""Whether a global batch of 1,024 reaches the accuracy of 32 in the same number of epochs.

`python -m benchmarks.large_batch --help`; docs/large-batch.md says what is trained and how the
rates were chosen. A block is one seed: initial weights and order of the samples.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from hpctrain.bench import BenchPlan, Case, Variant, command, run_plan
from hpctrain.errors import ConfigError
from hpctrain.report import Line, LineChart, write_chart

__all__ = ["BASELINE", "VARIANTS", "add_accuracies", "main", "plot"]

BASELINE = "sgd 32"
VARIANTS = (BASELINE, "sgd 1024 plain", "sgd 1024 warm-up", "lars 1024", "lamb 1024")
"""Names only: importing the settings would import torch before a rank has set its threads."""
EPOCHS = 80


def add_accuracies(result: dict[str, Any]) -> None:
    """Turn the accuracies of all seeds into the metrics of a result, in per cent. Pure."""
    by_case: dict[tuple[str, str], list[float]] = {
        (item["case"], item["variant"]): item["outcome"]["accuracies"] for item in result["series"]
    }
    for item in result["series"]:
        found = [100 * accuracy for accuracy in by_case[item["case"], item["variant"]]]
        item["metrics"] = {
            "test accuracy %": round(mean(found), 2),
            "least": round(min(found), 2),
            "most": round(max(found), 2),
        }
        baseline = by_case.get((item["case"], BASELINE))
        if baseline is not None:
            points = mean(found) - 100 * mean(baseline)
            item["metrics"][f"points from {BASELINE}"] = round(points, 2)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the test accuracy after each epoch, the mean over seeds, one line a variant.

    Raises:
        ConfigError: it is no SVG, and matplotlib is not installed.
    """
    lines = []
    for style, item in enumerate(result["series"]):
        curve = tuple(item["outcome"]["curve"])
        epochs = tuple(float(epoch) for epoch in range(1, len(curve) + 1))
        name = item["variant"]
        lines.append(Line(label=name, x=epochs, y=curve, style=style, has_markers=False))
    last = ", ".join(f"{line.label} {100 * line.y[-1]:.1f} %" for line in lines)
    chart = LineChart(
        key="large-batch",
        title="Digits: batches of 32 and of 1,024, the same epochs",
        description=f"Test accuracy by epoch; after the last one: {last}.",
        x_label="epoch",
        y_label="test accuracy",
        lines=tuple(lines),
        is_percent=True,
    )
    write_chart(chart, path)


def main() -> int:
    """Train, or be a rank that trains."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large_batch", description=__doc__)
    command.add_arguments(parser, blocks=8)
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, metavar="E", help=f"epochs (default: {EPOCHS})"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="OUT", help="draw the curves; all but .svg need matplotlib"
    )
    args = parser.parse_args()
    if args.worker:
        from benchmarks.large_batch_subjects import make
        from hpctrain.bench import serve

        serve(args.worker, args.variants.split(","), make)
        return 0
    rules = command.rules_of(args)
    names = command.choose("variant", args.variants or ",".join(VARIANTS), VARIANTS)
    epochs = 2 if args.quick else args.epochs
    if epochs < 1:
        raise ConfigError(f"epochs={epochs} must be at least 1")
    plan = BenchPlan(
        name="large_batch",
        module="benchmarks.large_batch",
        cases=[Case(name=f"digits, {epochs} epochs", warmup=0, repeats=1)],
        variants=[Variant(name=name, launch="all") for name in names],
        comparisons=[(name, BASELINE) for name in VARIANTS[1:]],
        rules=rules,
        settings={"epochs": epochs},
    )
    result = run_plan(plan, args.json)
    add_accuracies(result)
    if args.plot is not None:
        plot(result, args.plot)
    return command.report(args, result)


if __name__ == "__main__":
    sys.exit(command.run_main(main))
