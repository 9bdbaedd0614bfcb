"""Figures draw what they are given; report.html is whole, offline and escaped, also of an unfinished run."""

import base64
import io
import json
import math
import re
from html.parser import HTMLParser

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from core import figures, report, stats
from core.errors import UserError
from core.metrics import Writer

X = np.arange(5)
Y = np.array([[0.0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [1, 2, 3, 4, 50]])


def axes_of(figure):
    figure.savefig(io.BytesIO(), format="png")
    return figure.axes[0]


def test_curves_draw_median_and_quartiles_or_iqm_and_interval():
    axes = axes_of(figures.curves({"a": (X, Y), "b": (X, Y[0])}, xlabel="x", ylabel="y", threshold=3.5))
    a, b, threshold = axes.lines
    np.testing.assert_array_equal(a.get_ydata(), np.median(Y, axis=0))
    np.testing.assert_array_equal(b.get_ydata(), Y[0])
    assert list(threshold.get_ydata()) == [3.5, 3.5] and (axes.get_xlabel(), axes.get_ylabel()) == ("x", "y")
    (band,) = axes.collections
    assert band.get_paths()[0].vertices[:, 1].max() == np.percentile(Y[:, 4], 75)
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]

    axes = axes_of(figures.curves({"a": (X, Y)}, xlabel="x", ylabel="y", band="bootstrap"))
    np.testing.assert_allclose(axes.lines[0].get_ydata(), stats.iqm(Y, axis=0))
    high = axes.collections[0].get_paths()[0].vertices[:, 1].max()
    assert high == stats.stratified_bootstrap(Y[:, 4]).hi


@pytest.mark.parametrize("band", ["interquartile", "bootstrap"])
def test_a_nan_leaves_a_gap(band):
    y = Y.copy()
    y[1, 2] = math.nan
    axes = axes_of(figures.curves({"a": (X, y)}, xlabel="x", ylabel="y", band=band))
    assert np.isfinite(axes.lines[0].get_ydata()).tolist() == [True, True, False, True, True]
    with pytest.raises(ValueError, match="'interquartile' or 'bootstrap', not 'iqr'"):
        figures.curves({"a": (X, y)}, xlabel="x", ylabel="y", band="iqr")


def test_bars_show_statistic_interval_and_seeds():
    axes = axes_of(
        figures.bars({"a": [1.0, 2, 6], "b": 4.0}, xlabel="steps", statistic=np.median, threshold=3)
    )
    assert [bar.get_width() for bar in axes.patches] == [2, 4]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]
    interval, seeds = axes.lines[:2]
    assert list(interval.get_xdata()) == list(stats.stratified_bootstrap([1.0, 2, 6], np.median)[1:3])
    assert list(seeds.get_xdata()) == [1, 2, 6]


def test_image_grid_and_heatmap():
    images = np.random.default_rng(0).integers(0, 255, (5, 4, 6, 3)).astype(np.uint8)
    grid = figures.image_grid(images, ["one", "two"], columns=3)
    axes_of(grid)
    assert len(grid.axes) == 6 and grid.axes[0].get_title() == "one" and grid.axes[4].get_title() == ""
    np.testing.assert_array_equal(grid.axes[4].images[0].get_array(), images[4])
    assert not grid.axes[5].images
    axes = axes_of(figures.heatmap([[1.0, 2], [3, np.nan]], rows=["r", "s"], columns=["c", "d"]))
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "nan"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["r", "s"]


def test_figures_leave_matplotlib_as_it_was():
    before = dict(matplotlib.rcParams), plt.get_fignums()
    figures.curves({"a": (X, Y)}, xlabel="x", ylabel="y")
    figures.image_grid(np.zeros((1, 2, 2, 3)))
    assert (dict(matplotlib.rcParams), plt.get_fignums()) == before


CLAIM = {
    "name": "half",
    "statement": "Half the steps <b>suffice</b>",
    "value": 0.4,
    "interval": [0.25, 0.75],
    "level": 0.9,
    "op": "<=",
    "threshold": 0.5,
    "holds": True,
    "note": "a & b",
}
SUMMARY = {
    "status": "done",
    "seeds": [0, 1, 2],
    "claims": [
        CLAIM,
        {**CLAIM, "name": "dip", "op": ">", "holds": False, "interval": None, "note": ""},
        {**CLAIM, "name": "unmeasured", "value": None, "interval": None, "holds": False},
        {**CLAIM, "name": "open", "interval": [None, 1.0]},
    ],
    "metrics": {"steps": {"per_seed": [200, None, 700]}, "wall": 1.5},
    "environment": {"jax": "0.10.2", "mujoco": None},
    "commit": "0123456789abcdef",
    "dirty": True,
    "wall_s": 3661.0,
    "compile_s": 12.2,
}


@pytest.fixture
def workdir(tmp_path):
    config = {"name": "toy", "agent": {"lr": 1e-3, "sizes": [4, 4]}, "text": "<script>alert(1)</script>"}
    record = {"name": "toy", "variant": "small", "overrides": {"agent.lr": 0.001}, "config_sha256": "ab"}
    (tmp_path / "config.json").write_text(json.dumps({**record, "config": config}))
    writer = Writer(tmp_path)
    for step in range(1000):
        writer.write(
            step, {"loss": 1 / (1 + step), "gap": math.nan if 300 < step < 600 else step}, prefix="fit/a"
        )
    writer.write(5, {"once": 7.0, "never": math.inf})
    writer.close()
    (tmp_path / "figures").mkdir()
    for name in ("second", "first", "plain_name"):
        Image.new("RGB", (4, 3), "red").save(tmp_path / "figures" / f"{name}.png")
    captions = {"first": "The <first>", "second": "The second", "lost": "not there"}
    (tmp_path / "figures" / "captions.json").write_text(json.dumps(captions))
    return tmp_path


class Page(HTMLParser):
    """Checks that tags close in order, and collects attributes and visible text."""

    VOID = ("meta", "img", "rect", "path", "circle")

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.words = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def test_finished_run(workdir):
    (workdir / "summary.json").write_text(json.dumps(SUMMARY))
    path = report.write(workdir)
    assert path == workdir / "report.html"
    text = path.read_text()
    page = Page(text)
    words = " ".join(page.words)
    for part in (
        "2 of 4 claims hold · seeds 0, 1, 2 · 1 h 1 min, of which 12 s compiling",
        "commit 0123456789 with changes",
        "--config.agent.lr=0.001",
        "Half the steps <b>suffice</b>",
        "[0.25, 0.75]",
        "[n/a, 1]",
        "≤ 0.5",
        "> 0.5",
        "200 n/a 700",
        "<script>alert(1)</script>",
        "agent.sizes",
        "fit/a",
        "no finite value",
    ):
        assert part in words
    badges = re.findall(r'class="badge (\w+)">([^<]+)<', text)
    yes, no = ("holds", "holds"), ("fails", "does not hold")
    assert badges == [("done", "done"), yes, no, no, yes]
    assert words.index("The <first>") < words.index("The second") < words.index("plain name")
    assert "not there" not in words


def test_nothing_is_loaded_and_nothing_runs(workdir):
    (workdir / "summary.json").write_text(json.dumps(SUMMARY))
    page = Page(report.write(workdir).read_text())
    sources = [value for _, name, value in page.attributes if name in ("src", "href")]
    assert len(sources) == 3 and all(source.startswith("data:image/png;base64,") for source in sources)
    Image.open(io.BytesIO(base64.b64decode(sources[0].split(",")[1]))).verify()
    assert not {tag for tag, *_ in page.attributes} & {"script", "link", "iframe"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert "http" not in " ".join(page.words) and "url(" not in (workdir / "report.html").read_text()


def test_curves_have_gaps_ends_and_few_points(workdir):
    text = report.write(workdir).read_text()
    gap = text[text.index('aria-label="gap"') :].split("</svg>")[0]
    lines = re.findall(r'class="line" d="M([^"]*)"', gap)
    assert len(lines) == 2 and sum(line.count("L") for line in lines) < 300
    first = [float(x) for x in lines[0].replace("L", " ").split()]
    assert first[0] < 6 and 70 < first[1] <= 76
    assert ">0</text>" in gap and ">999</text>" in gap
    once = text[text.index('aria-label="once"') :].split("</svg>")[0]
    assert "<circle" in once and 'class="line"' not in once


def test_unfinished_run_says_so(workdir):
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "cut')
    text = report.write(workdir).read_text()
    words = " ".join(Page(text).words)
    assert "not finished" in words and "no summary yet" in words and "loss" in words
    assert "Claims" not in words and "Environment" not in words


def test_a_run_with_nothing_but_a_config(tmp_path):
    record = {"name": "toy", "variant": "smoke", "overrides": {}, "config": {}}
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert "not finished" in report.write(tmp_path).read_text()


def test_what_is_no_run_is_refused(tmp_path, workdir):
    with pytest.raises(UserError, match=r"no config\.json, so there is no run"):
        report.write(tmp_path / "elsewhere")
    (workdir / "summary.json").write_text("{")
    with pytest.raises(UserError, match=r"summary\.json: can not be read"):
        report.write(workdir)
