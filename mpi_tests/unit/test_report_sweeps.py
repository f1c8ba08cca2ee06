"""Reports on what sweeps themselves write, laws and settings included."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

from hpctrain.bench.summary import point_rows
from hpctrain.report import write_report
from hpctrain.report.results import understand
from hpctrain.report.study import study_sections
from mpi_tests.unit.test_scaling_sweeps import make_sweep, measure, result_of


def amdahl(point):
    return 0.1 + 0.9 / point.num_ranks


def page_of(result, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(result))
    (page,) = write_report([tmp_path / "result.json"], tmp_path / "page.html")
    return page.read_text()


def test_a_strong_sweep_with_its_laws(tmp_path):
    sweep = make_sweep(mode="strong", repeats=3)
    result = result_of(sweep, measure(sweep, amdahl))
    (study,) = understand(result, "x").studies
    four = study.of_engine("mpi")[-1]
    assert study.efficiency(four).median == pytest.approx(1 / (0.325 * 4), rel=0.01)
    assert study.serial_fraction(four) == pytest.approx(0.1, rel=0.05)
    assert sum(four.split_s.values()) == pytest.approx(four.step_s.median, rel=0.01)
    assert four.split_s["straggling"] == pytest.approx(0.01)
    page = page_of(result, tmp_path)
    assert "Amdahl" in page
    assert "<code>hpctrain bench\n" in page


def test_numbers_that_should_not_be_quoted_are_named(tmp_path):
    sweep = make_sweep(repeats=1)
    result = result_of(sweep, measure(sweep, amdahl))
    page = page_of(result, tmp_path)
    assert "Every point was measured once" in page
    assert "(measured once, so without an interval)" in page
    rows = [cell for row in point_rows(result)[1] for cell in row]
    assert not [cell for cell in rows if "[" in cell]
    (study,) = understand(result, "x").studies
    tables = study_sections(study, "k", None)[0].tables
    assert not [cell for table in tables for row in table.rows for cell in row if "[" in cell]
    result["num_noisy"], result["blocks"][0]["noisy"] = 1, True
    (tmp_path / "result.json").write_text(json.dumps(result))
    write_report([tmp_path / "result.json"], tmp_path / "out", formats=["csv", "tex"])
    header, *rows = csv.reader((tmp_path / "out" / "r0s0-points.csv").read_text().splitlines())
    assert header[-1] == "warning"
    assert all(row[-1].startswith("1 of 1 rounds were disturbed") for row in rows)
    assert all("measured once" in row[-1] for row in rows)
    text = (tmp_path / "out" / "report.tex").read_text()
    assert text.count(r"{\footnotesize 1 of 1 rounds were disturbed") == text.count(
        r"\begin{table}"
    )
    said = "1 of 1 rounds were disturbed by other processes: do not quote"
    assert said in page_of(result, tmp_path)


def test_one_process_is_called_fused_where_it_was_and_everyone_is_compared_with_it():
    sweep = make_sweep(repeats=2)
    found = measure(sweep, lambda p: 20.0 if p.role == "node" else 5.0)
    (study,) = understand(result_of(sweep, found), "x").studies
    assert study.whole_nodes[0].engine == "node, fused"
    speed, ratios = study_sections(study, "k", None)[0].tables
    assert speed.rows[1][:2] == ("node, fused", "1 x 8")
    assert speed.rows[1][speed.headers.index("ms a step")] == "20010 [20000, 20020]"
    compared = ratios.headers.index("over one process, all cores")
    assert [line[compared][:4] for line in ratios.rows] == ["", "", "1.00", "2.00", "4.00"]
    for launch in found.values():
        launch.report["is_fused"] = False
    (study,) = understand(result_of(sweep, found), "x").studies
    assert study.whole_nodes[0].engine == "node"


def test_settings_are_curves_of_their_own_and_failed_points_rows(tmp_path):
    sweep = make_sweep(vary=["precision=fp32,bf16"], repeats=2)
    found = measure(sweep, lambda p: 0.1 if p.values.get("precision") == "fp32" else 0.05)
    broken = next(key for key in found if key[0].startswith("mpi 4x"))
    why = "exit code 9: out of memory\nTraceback: much more"
    found[broken] = replace(found[broken], why=why, report=None)
    (study,) = understand(result_of(sweep, found), "x").studies
    assert study.engines == ("mpi precision=fp32", "mpi precision=bf16")
    assert [point.failure for point in study.failed] == [why]
    page = page_of(result_of(sweep, found), tmp_path)
    assert "out of memory" in page
    assert "much more" not in page


def test_a_script_that_takes_no_part_is_reported_by_its_launches(tmp_path):
    sweep = make_sweep(repeats=2)
    bare = {key: replace(one, report=None) for key, one in measure(sweep, amdahl).items()}
    page = page_of(result_of(sweep, bare), tmp_path)
    assert "ms a launch" in page
    assert "whole launches were timed" in page
    assert "there is no breakdown" in page
