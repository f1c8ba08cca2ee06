"""What is known of a job, in one form for all batch systems."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FINAL", "JobState"]

FINAL = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """One job, or one task of an array."""

    job: str
    state: str
    """In Slurm's words: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT and so on."""
    name: str = ""
    exit_code: int | None = None
    elapsed: str = ""
    restarts: int | None = None
    reason: str = ""
    log: str = ""

    @property
    def is_final(self) -> bool:
        """Whether it will not run any more."""
        return self.state in FINAL
