"""Reports as files: one page that needs nothing else, and the same in every other format."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from hpctrain.cli import main
from hpctrain.errors import ConfigError
from hpctrain.report import FORMATS, PlannedTraining, write_report
from hpctrain.report.charts import Bars, EventMark, Line, LineChart
from hpctrain.report.runs import parse_metrics, read_run, run_charts, run_figures, thin
from hpctrain.report.svg import render_svg
from mpi_tests.report_kit import (
    collectives,
    result,
    row,
    series,
    spread,
    swept,
    weak_sweep,
    write_run,
)

SVG = "{http://www.w3.org/2000/svg}"


class Reader(HTMLParser):
    """Tags that are open, ids, links, and whatever a browser would fetch or run."""

    VOID = frozenset(("meta", "link", "br", "img"))

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.fetched = [], [], [], []
        self.words = ""

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if "href" in found else []
        if tag in ("script", "link", "iframe", "object") or "src" in found:
            self.fetched.append(tag)
        self.fetched += [name for name in found if name.startswith("on")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words += data


def read_page(path):
    reader = Reader()
    reader.feed(path.read_text())
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "scale.json").write_text(json.dumps(weak_sweep()))
    (tmp_path / "collectives.json").write_text(json.dumps(collectives()))
    plain = result("data_loader", [series(name, 2, spread(0.01), variant=name) for name in "ab"])
    (tmp_path / "other.json").write_text(json.dumps(plain))
    trace = tmp_path / "trace"
    trace.mkdir()
    slowest = {
        "step": 7,
        "seconds": 0.3,
        "median_s": 0.1,
        "rank": 2,
        "phase": "input",
        "extra_s": 0.2,
    }
    facts = {"num_events": 9, "num_ranks": 4, "error_us": 1.2, "slowest": slowest}
    (trace / "trace-summary.json").write_text(json.dumps({"path": "trace.json.gz", **facts}))
    names = ("scale.json", "collectives.json", "other.json")
    return [*(tmp_path / name for name in names), write_run(tmp_path / "one"), trace]


def test_the_page_says_everything_and_needs_nothing(inputs, tmp_path):
    out = tmp_path / "page.html"
    planned = PlannedTraining(num_samples=1e8)
    assert write_report(inputs, out, planned=planned) == [out]
    page = read_page(out)
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids))
    inner = [link for link in page.links if link.startswith("#")]
    assert {link[1:] for link in inner} <= set(page.ids)
    assert [link for link in page.links if not link.startswith("#")] == ["trace/trace.json.gz"]
    for said in (
        "The fastest point is mpi on 16 ranks",
        "What limits it, and what to try",
        "waits 33 % of every step for gradients",
        "Ask for",
        "mpi reaches",
        "hpctrain bench scale train.py --ranks 1,2,4,8,16 --mode weak",
        "hpctrain train a.toml",
        "2 restarts and 12 checkpoints",
        "Rank 3 was the slowest in 75 % of the steps that record it, 8 % behind",
        'search for "step 7"',
        "MPICH 5.0.2",
        "other names no command",
        "exit code 1: no such file",
    ):
        assert said in page.words, said
    assert "http://" not in out.read_text().replace("http://www.w3.org/2000/svg", "")


def test_every_picture_is_well_formed_and_told_in_words(inputs, tmp_path):
    out = tmp_path / "page.html"
    write_report(inputs, out)
    drawn = re.findall(r"<svg.*?</svg>", out.read_text(), re.S)
    assert len(drawn) == 10
    for text in drawn:
        root = ET.fromstring(text)
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text
        assert len(root.find(f"{SVG}desc").text) > 20
        ids = {element.get("id") for element in root.iter()}
        used = set(re.findall(r"url\(#([^)]+)\)", text))
        assert used <= ids
        _, _, width, height = map(float, root.get("viewBox").split())
        for point in re.findall(r"[\d.]+,[\d.]+", " ".join(root_points(root))):
            x, y = map(float, point.split(","))
            assert 0 <= x <= width
            assert 0 <= y <= height


def root_points(root):
    return [element.get("points") for element in root.iter() if element.get("points")]


def test_curves_differ_without_colour():
    lines = tuple(Line(label=str(k), x=(1, 2), y=(k, k + 1), style=k) for k in range(6))
    chart = LineChart(key="k", title="t", description="d", x_label="x", y_label="y", lines=lines)
    text = render_svg(chart)
    curves = re.findall(r"<polyline[^>]*>", text)
    assert len({re.sub(r' (points|stroke)="[^"]*"', "", curve) for curve in curves}) == 6
    markers = {
        re.search(r' d="([^"]+)"', m)[1] for m in re.findall(r'<path[^>]*class="point"', text)
    }
    assert len(markers) == 6
    parts = tuple((str(k), (1.0, 2.0)) for k in range(6))
    bars = Bars(key="b", title="t", description="d", y_label="y", labels=("a", "b"), parts=parts)
    patterns = re.findall(r"<pattern.*?</pattern>", render_svg(bars))
    assert len({re.sub(r"#[0-9a-f]{6}|b-h\d", "", pattern) for pattern in patterns}) == 6


def test_a_value_that_is_not_finite_leaves_the_others_where_they_are():
    line = Line(label="loss", x=(1, 2, 3), y=(5.0, float("nan"), 7.0))
    chart = LineChart(key="k", title="t", description="d", x_label="x", y_label="y", lines=(line,))
    assert re.findall(r"<title>(loss[^<]*)</title>", render_svg(chart)) == [
        "loss: 5 at 1",
        "loss: 7 at 3",
    ]


def test_bars_whose_names_have_no_room_are_numbered():
    names = tuple(f"hpctrain-horovod-{kind}" for kind in "abcdefgh")
    parts = (("time", tuple(range(1, 9))),)
    bars = Bars(key="b", title="t", description="d", y_label="y", labels=names, parts=parts)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", render_svg(bars))
    assert [word for word in words if "hpctrain" in word] == [
        f"{number} {name}" for number, name in enumerate(names, 1)
    ]
    assert {str(number) for number in range(1, 9)} <= set(words)


def test_benchmarks_that_were_disturbed_say_so_and_runs_how_to_repeat_them(tmp_path):
    raw = collectives()
    raw["num_noisy"], raw["blocks"][0]["noisy"] = 1, True
    (tmp_path / "a.json").write_text(json.dumps(raw))
    run = write_run(tmp_path / "one", num_steps=20)
    (run / "environment.json").unlink()
    write_report([tmp_path / "a.json", run], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text()
    assert "rounds were disturbed by other processes: do not quote" in text
    assert f"hpctrain train {run}/config.toml -n " in text


def test_labels_of_users_cannot_break_the_page(tmp_path):
    nasty = '<script>alert(1)</script>&"%_$'
    raw = swept([row("alone", 1, 1.0, role="alone"), row(nasty, 2, 1.0), row(nasty, 4, 1.1)])
    (tmp_path / "a.json").write_text(json.dumps(raw))
    written = write_report(
        [tmp_path / "a.json"], tmp_path / "out", formats=("html", "tex", "md"), title=nasty
    )
    page = read_page(written[0])
    assert page.fetched == []
    assert "<script>" not in written[0].read_text()
    tex = (tmp_path / "out" / "report.tex").read_text()
    assert r"\&" in tex
    assert r"\%\_\$" in tex
    assert r"\textless{}script\textgreater{}" in tex


def test_all_formats_are_written(inputs, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is the optional extra plot")
    out = tmp_path / "out"
    files = {path.name for path in write_report(inputs[1:3], out, formats=FORMATS)}
    assert {"report.html", "report.md", "report.tex", "report.pdf"} <= files
    assert (out / "report.pdf").read_bytes().startswith(b"%PDF")
    pictures = [name for name in files if name.endswith(".png")]
    assert len(pictures) == 2
    for name in pictures:
        assert (out / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (out / "report.md").read_text()


def test_csv_has_bare_numbers_and_latex_a_table_for_the_proposal(inputs, tmp_path):
    out = tmp_path / "out"
    write_report(inputs[:1], out, formats=("csv", "tex", "md"))
    with (out / "r0s0-points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    last = next(r for r in rows if r["engine"] == "torch" and r["num_ranks"] == "16")
    assert float(last["step_s"]) == pytest.approx(0.06 * 1.064 + 0.0512)
    assert float(last["efficiency"]) < 0.6
    assert next(r for r in rows if r["engine"] == "horovod")["failure"]
    tex = (out / "report.tex").read_text()
    assert tex.count(r"\begin{tabular}") == tex.count(r"\end{tabular}") == 2
    for line in tex.splitlines():
        if line.endswith(r"\\"):
            assert line.count("&") in (6, 7)
    assert "| engine |" in (out / "report.md").read_text()


def test_what_is_missing_is_said(tmp_path):
    bare = swept([row("mpi", 1, 1.0), row("mpi", 2, 1.1)])
    (tmp_path / "a.json").write_text(json.dumps(bare))
    run = write_run(tmp_path / "killed", num_steps=20, killed=True)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[:-1]]
    kept = [{k: v for k, v in s.items() if k in ("kind", "step", "time_s", "loss")} for s in steps]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(k)}\n" for k in kept) + '{"ki')
    out = tmp_path / "page.html"
    write_report([tmp_path / "a.json", run], out)
    words = read_page(out).words
    for said in (
        "The parts of a step were not timed in this result: there is no breakdown.",
        "There is no undistributed baseline",
        "The parts of a step were not timed in this run",
        "Not readable in metrics.jsonl: 1 line.",
        "There is no summary.json: the run has not ended, or was killed.",
        "killed has no environment.json",
        "pass --samples N",
    ):
        assert said in words, said


def test_times_go_on_over_restarts():
    lines = [{"kind": "step", "time_s": t} for t in (0, 3600, 0, 1800)]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    assert [line["hours"] for line in parse_metrics(text)[0]] == [0, 1, 1, 1.5]
    walls = "".join(f'{{"wall": {w}, "time_s": 0}}\n' for w in (7200, 10800))
    assert [line["hours"] for line in parse_metrics(walls)[0]] == [0, 1]


def test_long_runs_are_thinned_and_keep_their_extremes(tmp_path):
    values = [(float(k), float(k % 10)) for k in range(1000)]
    points = thin(values, most=50)
    assert len(points) == 50
    assert all((low, high) == (0.0, 9.0) for _, _, low, high in points)
    assert thin(values[:3]) == [(x, y, y, y) for x, y in values[:3]]
    charts = run_charts(read_run(write_run(tmp_path / "one", num_steps=3000)), "t")
    loss = charts[0]
    assert [line.label for line in loss.lines] == ["training loss", "evaluation loss"]
    assert len(loss.lines[0].x) <= 300
    assert {mark.label for mark in loss.marks} == {"checkpoint", "restart"}
    assert isinstance(loss.marks[0], EventMark)
    assert sum(mark.label == "checkpoint" for mark in loss.marks) <= 60


def test_mistakes_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    cases = [
        ([tmp_path / "a.json"], {}, "is not a benchmark result"),
        ([tmp_path / "none.json"], {}, "cannot be read"),
        ([tmp_path / "empty"], {}, "not a run directory"),
        ([tmp_path / "a.json"], {"formats": ("html", "doc")}, "'doc' is unknown"),
    ]
    for inputs, more, words in cases:
        with pytest.raises(ConfigError, match=words):
            write_report(inputs, tmp_path / "out", **more)
    with pytest.raises(ConfigError, match="is one file"):
        write_report([], tmp_path / "a.html", formats=("html", "csv"))
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_reports_are_made_where_there_is_neither_torch_nor_mpi(inputs, tmp_path):
    code = (
        "import sys; from hpctrain.cli import main; "
        "assert main(['report', *sys.argv[1:]]) == 0; "
        "assert not {'torch', 'mpi4py', 'matplotlib'} & set(sys.modules)"
    )
    words = [*map(str, inputs), "-o", str(tmp_path / "page.html")]
    subprocess.run([sys.executable, "-c", code, *words], check=True, timeout=60)


def test_the_verb_names_what_it_wrote(inputs, tmp_path, capsys):
    out = tmp_path / "page.html"
    words = ["report", *map(str, inputs), "-o", str(out), "--samples", "1e6", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out) == [str(out)]
    assert "--samples 1e+06" in out.read_text()


def test_the_time_of_a_resumed_run_is_said_for_what_it_is(tmp_path):
    folder = write_run(tmp_path / "resumed")  # with two restarts
    whole = dict(map(reversed, run_figures(read_run(folder))))
    assert whole["resumed: time of the last job"] == "5.5 min"  # a summary of an older version
    assert whole["resumed: samples a second in the last job"] == "931"
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(
        json.dumps({**summary, "seconds": 990.0, "job_seconds": 330.0})
    )
    assert ("16.5 min", "resumed: training time") in run_figures(read_run(folder))
