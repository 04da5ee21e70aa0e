"""The renderings of a report: text (kept in `golden/`), HTML, JSON, Graphviz."""

import functools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxsched import explain, scheduled
from jaxsched._verdicts import Verdict
from tests.reported import REPORTED, N

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def report(name):
    fun, args = REPORTED[name]
    return explain(fun, donate_argnums=0)(*args)


def stable(text):
    """The text with temporary memory in steps of 10,000 bytes: scalars differ between versions."""

    def rounded(match):
        return f"{round(int(match[0].replace(',', '')), -4):,}"

    lines = text.splitlines()
    return "\n".join(
        re.sub(r"\d[\d,]*(?= bytes)", rounded, line) if "temporary memory" in line else line
        for line in [*lines, ""]
    )


@pytest.mark.parametrize("name", REPORTED)
def test_text(name, pytestconfig):
    path = GOLDEN / f"{name}.txt"
    found = stable(str(report(name)))
    if pytestconfig.getoption("--update-golden"):
        path.write_text(found)
    assert found == path.read_text()
    assert max(map(len, found.splitlines())) <= 100


def test_golden_files_are_those_of_the_reports():
    assert {path.stem for path in GOLDEN.iterdir()} == {*REPORTED}


def test_a_report_in_one_line():
    size = 4 * N * N
    assert repr(report("seed")) == (
        f"<Report on seed: not ok, 2 copies of {2 * size:,} bytes, {size:,} temporary bytes>"
    )


def test_the_reports_in_the_readme(tmp_path):
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```$", readme, re.M | re.S)
    [source] = [each for each in blocks if "from jaxsched import explain" in each]
    path = tmp_path / "step.py"
    path.write_text(source[: source.index("print")])
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    x = jax.ShapeDtypeStruct((10_000, 10_000), jnp.float32)
    for fun in (names["f"], scheduled(names["f"])):
        assert f"{explain(fun, donate_argnums=0)(x)}\n" in blocks


### HTML


class Page(HTMLParser):
    """The elements of a page: tag, attributes, and the text in them and below."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.open = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def find(self, tag, kind=None):
        """Attributes and text of all elements of a tag and a class."""
        return [
            (attributes, "".join(text))
            for name, attributes, text in self.elements
            if name == tag and (kind is None or kind in attributes.get("class", "").split())
        ]

    def titles(self, kind):
        """The hover texts in the elements of a class, or around them."""
        found = []
        for number, (_, attributes, _) in enumerate(self.elements):
            if kind in (attributes.get("class") or "").split():
                after = self.elements[number + 1 : number + 3]
                found += ["".join(text) for tag, _, text in after if tag == "title"][:1]
        return found


@functools.cache
def page(name):
    return Page(report(name).to_html())


@pytest.mark.parametrize("name", REPORTED)
def test_a_page_needs_nothing_from_elsewhere(name):
    html = report(name).to_html()
    assert not re.search(r"https?://|url\(|@import|<script|\son\w+=|javascript:", html)
    assert {tag for tag, _, _ in page(name).elements} <= set(
        "html head meta title link body style div h2 h3 svg rect line path circle g text tspan"
        " span details summary pre".split()
    )
    [(icon, _)] = page(name).find("link")
    assert icon["href"] == "data:,"  # or the browser would ask for one
    [(_, text)] = page(name).find("pre")
    assert text == str(report(name))


def test_bars_are_the_lives_of_the_buffers():
    chart = report("seed").charts[0]
    bars = [a for a, _ in page("seed").find("rect", "bar") if "rx" in a]
    assert len(bars) == len(chart.rows) == 3
    step = 22
    for attributes, row in zip(bars, chart.rows, strict=True):
        assert int(attributes["height"]) == step * (row.end - row.start) + 14
        assert ("copy" in attributes["class"]) == (row.copy_of is not None)
    tops = [int(attributes["y"]) for attributes in bars]
    assert tops == sorted(tops)
    assert tops[1] - tops[0] == step * (chart.rows[1].start - chart.rows[0].start)


def test_instructions_stand_in_their_final_order():
    shown = [text.split("reported.py")[0] for a, text in page("seed").find("text") if "dx" not in a]
    names = [name for name, _ in report("seed").charts[0].instructions]
    assert [text for text in shown if text in names] == names


def test_hovering_shows_the_line_of_the_user():
    reads = [title for title in page("seed_scheduled").titles("read") if title]
    writes = [title for title in page("seed_scheduled").titles("written") if title]
    assert any("reported.py:23  y = x[0, 0]" in title for title in reads)
    assert any("reported.py:24  x_new = x.at[0, 0].add(1)" in title for title in writes)


def test_copies_and_control_edges_are_drawn():
    def arrows(name, kind):
        return [a for a, _ in page(name).find("path", kind) if "head" not in a["class"].split()]

    legend = 1
    assert len(arrows("seed", "copied")) == legend + 2
    assert len(arrows("seed", "control")) == legend
    assert len(arrows("seed_scheduled", "copied")) == legend
    assert len(arrows("seed_scheduled", "control")) == legend + 1
    assert any(
        title.startswith("control edge: slice")
        for title in (text for _, text in page("seed_scheduled").find("title"))
    )


def test_one_chart_a_computation():
    titles = [text for _, text in page("loop_scheduled").find("h3")]
    assert titles == ["the whole program", "inside of reported.py:45"]


def test_a_notebook_cell_is_the_page_without_its_frame():
    fragment = report("seed")._repr_html_()
    assert fragment in report("seed").to_html()
    assert fragment.startswith('<div class="jaxsched">')
    Page(fragment)


def test_what_users_write_is_escaped(tmp_path):
    path = tmp_path / "a<b>&.py"
    path.write_text(
        "def fun(x):\n    y = x[0] if 1 < 2 else '</pre><script>'\n    return x.at[0].set(1.), y\n"
    )
    names = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    _, args = REPORTED["seed"]
    html = explain(names["fun"], donate_argnums=0)(*args).to_html()
    Page(html)
    assert "<script" not in html
    assert "a&lt;b&gt;&amp;.py" in html


### Data


def test_json():
    found = report("half_declared")
    data = json.loads(found.to_json())
    assert (data["name"], data["scheduled"], data["ok"]) == ("half_declared", True, False)
    assert data["copied_bytes"] == sum(copy["nbytes"] for copy in data["copies"])
    assert data["rescheduled"]["copies"] == 0
    [edge] = data["edges"]
    assert edge["first"]["statement"] == "y = x[i]"
    assert edge["first"]["file"] == __file__.replace("test_render", "reported")
    assert found.edges[0].first is not None
    assert edge["first"]["line"] == found.edges[0].first.number
    assert edge["verdict"] == "held by a control edge"
    assert data["charts"][0]["rows"][0]["name"] == "x"


def test_graphviz():
    lines = report("seed_scheduled").to_dot().splitlines()
    assert lines[0] == 'digraph "seed_scheduled" {'
    assert lines[2:] == [
        '  n0 [label="reported.py:23\\ny = x[0, 0]"];',
        '  n1 [label="reported.py:24\\nx_new = x.at[0, 0].add(1)"];',
        '  n0 -> n1 [label="declared: held by a control edge", color="#1a7f37"];',
        "}",
    ]


def test_every_verdict_has_a_style():
    from jaxsched._render_data import _STYLES

    assert {*_STYLES} == {*Verdict}
