"""The page: complete, self-contained, small, escaped, and really drawn by a browser."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
from browser import draw
from page_results import calibration, comparison, learned, replayed, training

from app.cli import main
from app.report.svg import Scale, element, padded
from app.report.write import render

KINDS = {
    "compare": comparison,
    "train": training,
    "online": learned,
    "replay": replayed,
    "calibrate": calibration,
}
PLOTS = {"compare": 11, "train": 14, "online": 7, "replay": 7, "calibrate": 4}


def advised(folder: Path) -> dict:
    """What `routepack advise` writes about a preset."""
    arguments = ["--windows", "1", "--budget", "0.05", "--json", str(folder / "a.json")]
    page = str(folder / "a.html")
    assert main(["advise", "slime:qwen3-30b", *arguments, "--output", page]) == 0
    return json.loads((folder / "a.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["compare", "train", "online", "replay", "advise", "calibrate"])
def test_a_real_browser_draws_every_plot(kind, tmp_path, record_property):
    content = advised(tmp_path) if kind == "advise" else KINDS[kind]()
    source = tmp_path / f"{kind}.json"
    source.write_text(json.dumps(content))
    assert main(["report", str(source)]) == 0
    page = source.with_suffix(".html")
    assert page.stat().st_size < 3 * 2**20
    kept = Path(os.environ.get("ROUTEPACK_TEST_OUTPUT", tmp_path))
    kept.mkdir(parents=True, exist_ok=True)
    found = draw(page, kept / f"report-{kind}.png")
    record_property("screenshot", str(kept / f"report-{kind}.png"))
    record_property("report.draw_ms", found["milliseconds"])
    assert found["errors"] == []
    assert found["requests"] == []
    assert found["milliseconds"] < 2000
    assert len(found["plots"]) == PLOTS.get(kind, len(found["plots"])) > 0
    for plot in found["plots"]:
        assert plot["width"] > 200 and plot["height"] > 60, plot
        assert plot["drawn"] > 5, plot
        assert plot["outside"] == 0, plot
    assert (kept / f"report-{kind}.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_page_fits_a_laptop(tmp_path):
    page = tmp_path / "c.html"
    page.write_text(render(comparison(), "c.json"), encoding="utf-8")
    assert draw(page, tmp_path / "c.png", width=1280)["width"] <= 1280
    assert draw(page, tmp_path / "c.png", width=640)["width"] <= 640


def test_the_page_needs_no_network():
    text = render(comparison(), "c.json")
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in outside and "<script" not in text and "@import" not in text


def test_full_against_off_comes_first():
    text = render(comparison(), "c.json")
    assert text.index("Full against off") < text.index("Ratios with 95%")
    assert "Full trains more tokens per second than off" in text


def test_policies_that_learn_unlike_off_are_named():
    content = learned()
    assert "No policy's rewards can be told from those of off" in render(content, "o.json")
    content["figures"]["online.alike.full"] = 0.0
    assert "The rewards of full differ from those of off" in render(content, "o.json")


def test_an_unproven_difference_is_called_so():
    content = comparison()
    for m in content["details"]["measurements"]:
        m["tps"] = [5000.0 + (7 * m["window"]) % 5, 5001.0, 5002.0]
    assert "No difference in tokens per second is proven" in render(content, "c.json")


def test_what_is_missing_is_named():
    content = comparison()
    del content["details"]["rank_load"], content["details"]["rows"]
    for m in content["details"]["measurements"]:
        del m["J1_over_B"], m["times"]
    text = render(content, "c.json")
    for name in ("details.rank_load", "details.rows", "J1_over_B", "measurements[].times"):
        assert f"Not in this file: {name}" in text or name in text


def test_texts_are_escaped():
    content = copy.deepcopy(replayed())
    content["details"]["source"] = "<script>alert(1)</script>"
    text = render(content, "<b>.json")
    assert "<script>" not in text and "<b>" not in text
    assert "&lt;script&gt;" in text


def test_a_scale_ticks_at_round_values():
    assert Scale(0.0, 1.0, 0, 100).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Scale(5.0, 5.0, 0, 100).ticks() == [5.0]
    assert padded([2.0, 2.0])[0] < 2.0 < padded([2.0, 2.0])[1]


def test_text_and_elements_keep_their_order():
    from xml.etree import ElementTree

    node = element("p", "a", element("b", "c"), "d", class_="x")
    assert ElementTree.tostring(node, encoding="unicode") == '<p class="x">a<b>c</b>d</p>'
