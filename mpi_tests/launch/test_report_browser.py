"""Reports in a real browser: nothing overflows, overlaps, is blank, fetched or complained about."""

from __future__ import annotations

import base64
import json
import os

import pytest

from hpctrain.report import PlannedTraining, write_report
from mpi_tests.browser import Browser, find_browser
from mpi_tests.report_kit import collectives, weak_sweep, write_run

LOOK = """(() => {
  const wrong = [], root = document.documentElement;
  const say = (text) => wrong.push(text);
  if (root.scrollWidth > root.clientWidth) say(`page: ${root.scrollWidth} > ${root.clientWidth}`);
  const pictures = [...document.querySelectorAll('svg.chart')];
  for (const svg of pictures) {
    const box = svg.getBoundingClientRect();
    if (box.width < 200 || box.height < 120) say(`${svg.id}: ${box.width} x ${box.height}`);
    const texts = [...svg.querySelectorAll('text')].filter((t) => t.textContent);
    const boxes = texts.map((t) => t.getBoundingClientRect());
    boxes.forEach((b, i) => {
      const name = `${svg.id}: "${texts[i].textContent}"`;
      if (b.left < box.left - 1 || b.right > box.right + 1) say(`${name} leaves sideways`);
      if (b.top < box.top - 1 || b.bottom > box.bottom + 1) say(`${name} leaves up or down`);
      boxes.slice(i + 1).forEach((c, j) => {
        const wide = Math.min(b.right, c.right) - Math.max(b.left, c.left);
        const high = Math.min(b.bottom, c.bottom) - Math.max(b.top, c.top);
        if (wide > 1 && high > 3) say(`${name} and "${texts[i + 1 + j].textContent}" overlap`);
      });
    });
  }
  for (const one of document.querySelectorAll('h1, h2, p, .figures div, .findings, figure')) {
    if (one.scrollWidth > one.clientWidth + 1) say(`wide: ${one.textContent.slice(0, 40)}`);
  }
  return JSON.stringify({
    wrong,
    pictures: pictures.map((svg) => {
      const b = svg.getBoundingClientRect();
      return {id: svg.id, x: b.x, y: b.y + window.scrollY, width: b.width, height: b.height};
    }),
    height: root.scrollHeight,
    unnamed: pictures.filter((svg) => !svg.querySelector('title')).length,
    smallest: Math.min(...[...document.querySelectorAll('p, td, dt')].map(
      (e) => parseFloat(getComputedStyle(e).fontSize))),
  });
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    path = find_browser()
    if path is None:
        reason = "no browser is installed (Debian: apt-get install chromium)"
        if os.environ.get("MPI_TESTS_REQUIRE_CLUSTER"):
            pytest.fail(f"MPI_TESTS_REQUIRE_CLUSTER is set, but {reason}")
        pytest.skip(reason)
    made = Browser(path, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    (folder / "scale.json").write_text(json.dumps(weak_sweep()))
    (folder / "collectives.json").write_text(json.dumps(collectives()))
    run = write_run(folder / "one")
    inputs = [folder / "scale.json", folder / "collectives.json", run]
    out = folder / "page.html"
    write_report(inputs, out, planned=PlannedTraining(num_samples=1e9, runs=3))
    return out


@pytest.mark.parametrize(("width", "media"), [(1280, "screen"), (390, "screen"), (760, "print")])
def test_everything_is_where_it_belongs(browser, page, width, media):
    browser.open(page, width=width, media=media)
    seen = json.loads(browser.look(LOOK))
    assert seen["wrong"] == []
    assert seen["unnamed"] == 0
    assert len(seen["pictures"]) == 9
    assert seen["smallest"] > 10.6  # 8 pt on paper
    assert seen["height"] > 2000
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]


def test_every_picture_shows_something(browser, page):
    browser.open(page, width=1280)
    for place in json.loads(browser.look(LOOK))["pictures"]:
        name = place.pop("id")
        width, height, rows = browser.picture(**place)
        assert width >= place["width"] - 1, name
        assert height >= place["height"] - 1, name
        # A blank picture has a handful of different bytes, text and curves have most of them.
        assert len(set(rows)) > 100, name


def test_it_prints_on_several_sheets_with_what_is_folded_away_on_screens(browser, page):
    seen = "document.querySelector('details table').checkVisibility({contentVisibilityAuto: true})"
    browser.open(page, width=1280)
    assert browser.look("document.querySelector('details').open") is False
    assert browser.look(seen) is False
    browser.open(page, width=1280, media="print")
    assert browser.look(seen) is True
    sheets = base64.b64decode(browser.ask("Page.printToPDF", printBackground=False)["data"])
    assert sheets.startswith(b"%PDF")
    assert sheets.count(b"/Type /Page\n") + sheets.count(b"/Type /Page ") >= 3
