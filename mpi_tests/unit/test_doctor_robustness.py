"""Doctor itself: checks that raise or hang, machines with nothing on them, its lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path

from hpctrain.doctor.examination import CHECKS, examine
from hpctrain.doctor.facts import Facts, without_launcher
from hpctrain.doctor.verdict import Check, as_json, exit_code, render, summarise
from hpctrain.programs import ask


def facts(limit_s: float = 5.0) -> Facts:
    return Facts(
        {"PATH": "/nowhere"}, python=Path("/no/python"), prefix=Path("/no"), limit_s=limit_s
    )


def test_a_check_that_raises_is_a_broken_line() -> None:
    def bad(facts: Facts) -> Check:
        raise KeyError("version")

    (check,) = examine(facts(), [("torch", bad)])
    assert (check.name, check.status) == ("torch", "broken")
    assert "KeyError: 'version'" in check.text


def test_a_check_that_never_returns_is_a_broken_line() -> None:
    release = threading.Event()

    def stuck(facts: Facts) -> Check:
        release.wait(30)
        return Check(name="slow", status="ok", text="")

    (check,) = examine(facts(limit_s=0.01), [("slow", stuck)])
    release.set()
    assert check.status == "broken"
    assert "did not end within" in check.text


def test_a_machine_with_nothing_on_it_breaks_no_check() -> None:
    verdicts = list(examine(facts()))
    assert [check.name for check in verdicts] == [name for name, _ in CHECKS]
    assert {c.name: c.status for c in verdicts}["MPI and launcher"] == "broken"
    own_fault = [check.text for check in verdicts if "the check" in check.text]
    assert [text for text in own_fault if "/no/python" not in text] == []
    assert exit_code(verdicts) == 1
    json.dumps(as_json(verdicts))


def test_ask_bounds_children_that_hold_the_output() -> None:
    answer = ask(["/bin/sh", "-c", "sleep 30 & sleep 30"], environ={"PATH": "/bin"}, limit_s=0.2)
    assert answer.hung
    assert "0.2 s" in answer.reason
    assert ask(["/no/such"], environ={}, limit_s=1).code is None


def test_the_launchers_variables_do_not_reach_our_ranks() -> None:
    environ = {"PMI_RANK": "0", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "tcp", "PATH": "/bin"}
    assert without_launcher(environ) == {"OMPI_MCA_btl": "tcp", "PATH": "/bin"}


def test_lines() -> None:
    check = Check(name="x", status="broken", text="word " * 30, cure="mend it")
    lines = render(check, name_width=4).splitlines()
    assert lines[0].startswith("broken   x     word word")
    assert lines[-1].strip() == "fix: mend it"
    assert max(map(len, lines)) <= 100
    fine = Check(name="y", status="ok", text="fine", cure="ignored")
    assert render(fine, name_width=1) == "ok       y  fine"
    assert summarise([fine]) == "all 1 checks are ok"
    assert summarise([fine, check]) == "2 checks: 1 broken, 0 warnings"
    assert (exit_code([fine]), exit_code([fine, check])) == (0, 1)
