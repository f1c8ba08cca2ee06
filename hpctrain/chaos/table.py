"""What `hpctrain chaos` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.chaos.running import Row
from hpctrain.chaos.soak import Outcome, Round

__all__ = ["describe_outcome", "describe_round", "render_rows"]

_HEAD = ("scenario", "what was done", "what was expected", "what happened", "seconds")


def render_rows(rows: Sequence[Row]) -> str:
    """A table with a line for each scenario."""
    cells = [_HEAD] + [
        (row.name, row.done, row.expected, row.happened, f"{row.seconds:.1f}") for row in rows
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)


def describe_round(one: Round) -> str:
    """A line for one attempt of a soak."""
    where = "before training" if one.from_step is None else f"steps {one.from_step + 1}"
    until = f" to {one.last_step}" if one.from_step is not None else ""
    damaged = f", {one.damaged} damaged before" if one.damaged else ""
    trouble = f": {'; '.join(one.trouble)}" if one.trouble else ""
    return (
        f"{one.kind:6} {one.ranks} ranks, {where}{until}, exit code {one.code}, "
        f"{one.seconds:.1f} s{damaged}{trouble}"
    )


def describe_outcome(outcome: Outcome) -> str:
    """How a soak went, in a few lines."""
    kills = len(outcome.rounds) - 1
    damaged = sum(1 for one in outcome.rounds if one.damaged)
    weights = {None: "", True: ", the weights are the same bit for bit", False: ""}
    lines = [
        f"killed {kills} times, {damaged} checkpoints damaged, seed {outcome.seed}; "
        f"{outcome.num_steps} steps, {outcome.num_epochs} epochs of {outcome.num_samples} samples",
        f"accuracy {outcome.accuracy}, undisturbed {outcome.undisturbed_accuracy}"
        + weights[outcome.same_weights],
    ]
    if outcome.good:
        lines.append(
            "every sample of every epoch exactly once; no damaged checkpoint loaded; nothing left "
            "behind"
        )
    return "\n".join([*lines, *outcome.trouble])
