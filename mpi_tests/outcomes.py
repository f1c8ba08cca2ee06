"""One outcome made of every rank's. Pure, so that it is tested without MPI."""

from __future__ import annotations

Outcome = tuple[str, str]
"""`passed`, `failed` or `skipped`, and the text that goes with it."""


def merge(outcomes: list[Outcome]) -> Outcome:
    """Merge the outcomes of one test on all ranks, in rank order."""
    size = len(outcomes)
    kinds = {kind for kind, _ in outcomes}
    if kinds == {"passed"}:
        return "passed", ""
    if kinds == {"skipped"}:
        return "skipped", outcomes[0][1]
    if "failed" not in kinds:
        skipped = [rank for rank, (kind, _) in enumerate(outcomes) if kind == "skipped"]
        return "failed", f"skipped on ranks {skipped} of {size} only; all ranks must skip together"
    by_text: dict[str, list[int]] = {}
    for rank, (kind, text) in enumerate(outcomes):
        if kind == "failed":
            by_text.setdefault(text, []).append(rank)
    parts = []
    for text, ranks in by_text.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"{who} of {size}:\n{text}")
    return "failed", "\n\n".join(parts)
