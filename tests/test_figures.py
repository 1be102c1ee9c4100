"""Figures: what a routing map says, and that every renderer writes it as it is."""

import subprocess
import sys

import numpy as np
import plotly.io
import pytest
import trace_cases
from browser import open_page

import resinspect as ri
from resinspect.errors import OptionError
from resinspect.figures import FIGURES, Heatmap
from resinspect.figures.description import colour_range
from resinspect.figures.save import FORMATS

NASTY = ("<b>bold</b>", "$x$", "$\\frac$", "a\nb", "&amp; & %{x}", "שלום", "😀", "中", "\x1b\u202e")


def heatmap(labels=NASTY, **changes):
    count = len(labels)
    values = np.tril(np.linspace(0, 1, count * count).reshape(count, count))
    parts = {"title": f"t {labels[0]} {labels[1]}", "label": "w $x$", "caption": "c <i> $y$\nd"}
    return Heatmap(values=values, x=tuple(labels), y=tuple(labels), limits=(0.0, 1.0), **(parts | changes))


def with_weight(change):
    """A trace of 3 + 4 tokens, 5 readers, 5 sources, after a change to its weights (token, reader, source)."""
    weight = trace_cases.arrays()["weight"]
    change(weight)
    return trace_cases.make(weight=weight)


def test_mean_is_of_the_per_token_rows():
    """A mean of something else than the rows, readers and sources swapped, or sorted labels."""
    trace = trace_cases.make()
    description = ri.routing_map(trace)
    np.testing.assert_allclose(description.values, trace["weight"].values.astype(float).mean(axis=0))
    assert description.x == ("embed", "0.attn", "0.mlp", "1.attn", "1.mlp")
    assert description.y == ("0.attn", "0.mlp", "1.attn", "1.mlp", "final")
    assert description.title == "tiny (pre_ln) · routing weight, mean over 7 tokens"
    assert "7 tokens of 2 prompts" in description.caption
    assert description.label == "routing weight"


def test_caption_carries_the_fidelity():
    """A map that does not say how far it can be trusted."""
    trace = trace_cases.make()
    assert ri.routing_map(trace).caption.startswith(ri.describe(trace))
    one = ri.routing_map(trace, token=4)
    assert one.caption.startswith(ri.describe(ri.select(trace, tokens=4)))
    assert "exact" in one.caption
    assert "prompt 1, position 1" in one.caption


def test_one_token_is_its_own_row():
    """A token map that averages, or takes the row of another token."""
    trace = trace_cases.make(text=["a", "b", "\n<b>$", "d", "e", "f", "g"])
    description = ri.routing_map(trace, token=2)
    np.testing.assert_array_equal(description.values, trace["weight"].values[2].astype(float))
    assert description.title == "tiny (pre_ln) · routing weight, token 2 '⏎<b>$'"
    assert description.limits == ri.routing_map(trace, token=5).limits


def test_unidentifiable_tokens_are_left_out_and_counted():
    """NaN that spreads into the mean, counts as 0, or is left out in silence; a lost cell that looks like no source."""

    def lose(weight):
        weight[:2, 3, 1] = np.nan
        weight[:, 4, 2] = np.nan

    trace = with_weight(lose)
    description = ri.routing_map(trace)
    assert description.values[3, 1] == pytest.approx(trace["weight"].values[2:, 3, 1].astype(float).mean())
    assert np.isnan(description.values[4, 2])
    assert "up to 2 of 7 tokens, in 1 cell" in description.caption
    assert "not identifiable (1 cell)" in description.caption
    assert np.argwhere(description.unknown).tolist() == [[4, 2]]
    assert "mean of 5 of 7 tokens" in description.notes[3, 1]
    np.testing.assert_array_equal(np.isnan(description.values[:, 4]), [True] * 4 + [False])


def test_readers_that_are_not_exact_are_marked():
    """A wrong row that looks like the others, or a verdict of all tokens on a token that is fine."""
    fidelity = trace_cases.arrays()["fidelity"]
    fidelity[1, 2], fidelity[:, 3] = 0.5, np.nan
    trace = trace_cases.make(fidelity=fidelity)
    rows = ri.routing_map(trace).rows
    assert rows == ("0.attn", "0.mlp", "⚠ 1.attn (off)", "⚠ 1.mlp (unknown)", "final")
    assert ri.routing_map(trace, token=0).rows[2] == "1.attn"
    assert "fidelity 5.0e-01 · off" in ri.routing_map(trace, token=1).notes[2, 0]
    assert "not known" in ri.routing_map(trace).notes[3, 0]


def test_colours_part_at_zero_only_for_negative_weights():
    """A scale whose middle is not 0, or rounding noise below 0 that turns a plain map two-coloured."""
    assert ri.routing_map(trace_cases.make()).diverging
    positive = ri.routing_map(with_weight(lambda weight: np.abs(weight, out=weight)))
    assert positive.limits == (0.0, np.nanmax(positive.values))
    assert colour_range(-1e-7, 1.0) == (0.0, 1.0)
    assert colour_range(-3.0, 1.0) == (-3.0, 3.0)
    assert colour_range(np.nan, np.nan) == colour_range(0.0, 0.0) == (0.0, 1.0)


def test_values_beyond_the_colours_are_announced():
    """Cut colours that pass for the true range."""
    trace = trace_cases.make()
    assert "Colours from -0.1 to 0.1; the values go from" in ri.routing_map(trace, limits=(-0.1, 0.1)).caption
    assert "Colours" not in ri.routing_map(trace, limits=(-9, 9)).caption


def test_a_long_trace_is_averaged_in_parts():
    """A part that is lost or counted twice."""
    trace = trace_cases.make(lengths=(5000,))
    expected = trace["weight"].values.astype(float).mean(axis=0)
    np.testing.assert_allclose(ri.routing_map(trace).values, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": 7}, "token is 7; this trace of 7 tokens has 0 to 6"),
        ({"token": -1}, "token is -1"),
        ({"value": "gram"}, "value is 'gram'; this trace can be mapped by weight, cross"),
        ({"limits": (1, 2)}, r"limits are \(1, 2\)"),
        ({"limits": (0, 0)}, "a number above 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    """A wrong token or variable that gives some other map."""
    with pytest.raises(OptionError, match=message):
        ri.routing_map(trace_cases.make(), **options)


def test_a_trace_without_tokens_is_refused():
    """A map of nothing."""
    with pytest.raises(OptionError, match="no tokens"):
        ri.routing_map(ri.select(trace_cases.make(), tokens=[]))


def test_units_are_on_the_colour_bar():
    """A quantity with units that is drawn without them."""
    assert ri.routing_map(trace_cases.make(), value="cross").label.endswith("[activation²]")


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.filterwarnings("error")
def test_saving_is_literal_complete_and_repeatable(tmp_path, suffix):
    """A formula parsed out of a label, a glyph that is missing, a date in the file, or a temporary file left."""
    paths = [tmp_path / f"{i}{suffix}" for i in range(2)]
    for path in paths:
        assert ri.save_figure(heatmap(), path) == path
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert len(first) > 5_000
    assert sorted(tmp_path.iterdir()) == paths
    if suffix in (".html", ".svg"):
        assert b"<b>bold" not in first.replace(b"<!-- <b>bold</b> -->", b"").replace(b"<!-- t <b>bold</b> $x$ -->", b"")


def test_saving_is_the_same_in_another_process(tmp_path):
    """Ids that change with the process: a figure under version control that changes with every run."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_figures import heatmap; import resinspect as ri\n"
        "for path in sys.argv[1:]: ri.save_figure(heatmap(), path)"
    )
    names = [f"a{suffix}" for suffix in FORMATS]
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        subprocess.run([sys.executable, "-c", code, *(str(tmp_path / folder / name) for name in names)], check=True)
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name


def test_a_file_that_cannot_be_written(tmp_path):
    """A traceback, a wrong format under another name, or an earlier figure that is gone after a failure."""
    description = heatmap()
    with pytest.raises(OptionError, match=r"'a.jpeg' ends in '.jpeg'; .* \.html, \.png, \.svg, \.pdf"):
        ri.save_figure(description, tmp_path / "a.jpeg")
    with pytest.raises(OptionError, match="nowhere does not exist"):
        ri.save_figure(description, tmp_path / "nowhere" / "a.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        ri.save_figure(description, tmp_path / "taken.png")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


def test_drawing_leaves_matplotlib_alone(tmp_path):
    """A figure that stays in pyplot and fills the memory, or settings that leak into the user's own plots."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); from test_figures import heatmap; import resinspect as ri\n"
        "import matplotlib; before = matplotlib.rcParams.copy()\n"
        "ri.save_figure(heatmap(), sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert matplotlib.rcParams.copy() == before"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.svg")], check=True)


def test_marks_shapes_and_notebooks(monkeypatch):
    """A description whose labels belong to other rows, or that a notebook shows as a line of Python."""
    with pytest.raises(OptionError, match="values has shape"):
        Heatmap(np.zeros((2, 3)), ("a",), ("b",), "", "", "", (0, 1))
    with pytest.raises(OptionError, match="1 marks for 9 rows"):
        heatmap(marks=("off",))
    monkeypatch.setattr(plotly.io.renderers, "default", "plotly_mimetype")
    assert heatmap()._repr_mimebundle_().keys() == {"application/vnd.plotly.v1+json"}
    assert repr(heatmap()) == "<Heatmap 't <b>bold</b> $x$', 9 × 9>"


def test_plotly_gets_no_markup():
    """A label that plotly reads as a tag, or that a notebook, which loads MathJax, typesets as a formula."""
    text = ri.to_plotly(heatmap(notes=np.full((9, 9), "$z$"))).to_json()
    assert "$" not in text
    assert "<b>" not in text


def test_every_figure_is_in_the_table():
    """A figure that the surfaces cannot find."""
    assert FIGURES["routing_map"] is ri.routing_map


@pytest.mark.parametrize(
    ("text", "shown"),
    [("\n", "⏎"), ("\t \r", "⇥ ␍"), ("\x1b", "\\x1b"), ("\u202eab", "\\u202eab"), ("👩\u200d🚀 é", None)],
)
def test_visible_text(text, shown):
    """A token that is there but not seen, or that turns the writing direction of what follows."""
    assert ri.visible_text(text) == (text if shown is None else shown)


@pytest.mark.browser
def test_the_page_is_literal_and_needs_no_network(tmp_path):
    """A label that becomes bold or a formula, a page that is blank offline."""
    path = ri.save_figure(heatmap(unknown=np.eye(len(NASTY))[::-1] > 0), tmp_path / "a.html")
    with open_page(allowed=("file:",)) as (page, wrong):
        page.goto(path.as_uri())
        page.wait_for_selector(".ytick text")
        shown = [text.replace("\xa0", " ") for text in page.locator(".xtick text").all_text_contents()]
        assert shown == [ri.visible_text(label) for label in NASTY]
        assert page.locator(".gtitle").text_content() == "t <b>bold</b> $x$"
        assert page.locator(".ytick [style*='bold']").count() == 0
        page.mouse.move(*_middle(page, 0))
        assert "reader <b>bold</b>" in page.locator(".hoverlayer").text_content()
        assert not wrong


def _middle(page, row):
    """Where a cell of the first column is on the screen."""
    box = page.locator(".xy .plot, .nsewdrag").first.bounding_box()
    size = len(NASTY)
    return box["x"] + box["width"] / size / 2, box["y"] + box["height"] * (row + 0.5) / size
