"""The page in a headless browser: it has no errors, uses no network, and everything is visible."""

import json

import pytest
import torch

from dcls_convert import load_converted
from dcls_convert.tuning import PositionTracker
from dcls_convert.views.page import filled_page
from dcls_convert.views.page import page as page_text

from ..command_line import run
from ..conftest import TINY
from .test_figures import model_and_plan, pictures_of

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("default")]

VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
MIN_SIDE = 40  # pixels; smaller figures count as invisible


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    run(
        f"timm:{TINY}",
        "--dilated-size",
        9,
        "--input-size",
        "3x64x64",
        "-q",
        "--output",
        folder / "net",
    )
    model = load_converted(folder / "net")
    tracker = PositionTracker(model, folder / "positions.jsonl")
    for step in range(5):
        tracker.update(step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("positions"):
                    parameter.add_(0.3)
    keep_only_one_speed_(folder / "positions.jsonl")
    run(
        "inspect",
        folder / "net",
        "--html",
        folder / "page.html",
        "--history",
        folder / "positions.jsonl",
    )
    return folder / "page.html"


def keep_only_one_speed_(record):
    """Keep a small speed in step 2 only, as in a run that was resumed before and after it."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    for line in lines:
        for row in line["positions"]:
            row["speed"] = 7.8e-5 if line["step"] == 2 else None
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(params=VIEWS, ids=lambda view: "-".join(map(str, view)))
def view(request, browser, page_file):
    """The page in a browser, with the problems and the requests since it was opened."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.problems = []
    page.requests = []
    page.on("console", lambda message: page.problems.append(message.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.requests.append(request.url))
    page.goto(page_file.as_uri())
    assert page.locator("details[open]").count() == 2  # the first layers
    page.evaluate("document.querySelectorAll('details').forEach(node => { node.open = true; })")
    page.wait_for_selector(
        "details:last-of-type canvas[style*=height]"
    )  # drawn once its width is known
    for link in page.locator("nav a").all():
        assert page.locator(link.get_attribute("href")).count() == 1
    yield page
    assert page.problems == []
    assert {url for url in page.requests if not url.startswith("data:")} == {page_file.as_uri()}
    context.close()


def test_every_figure_has_a_name_and_is_visible_within_the_page(view):
    width = view.viewport_size["width"]
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    for section in (
        "Where the elements are",
        "Effective receptive field",
        "Training",
        "What it costs",
        "Kernels",
    ):
        assert (
            view.locator(
                "section", has=view.get_by_role("heading", name=section, exact=True)
            ).count()
            == 1
        )
    figures = view.locator("figure").all()
    assert len(figures) > 10
    for figure in figures:
        for part in [figure, *figure.locator("> svg, svg[role=img], canvas").all()]:
            box = part.bounding_box()
            assert min(box["width"], box["height"]) >= MIN_SIDE
            assert 0 <= box["x"] <= width - box["width"]
    for node in view.locator("figure [role=img]").all():
        assert node.get_attribute("aria-label")
    for button in view.locator("button, input").all():
        assert button.get_attribute("aria-label") or button.inner_text()


def test_no_text_of_a_tile_or_chart_is_cut_off(view):
    tiles = view.locator(".facts div")
    assert tiles.count() > 5
    for tile in tiles.all():
        assert tile.evaluate("node => node.scrollWidth <= node.clientWidth")
    for chart in view.locator("section#training figure:not(.joint) > svg").all():
        box = chart.bounding_box()
        for text in chart.locator("text").all():
            text_box = text.bounding_box()
            assert box["x"] <= text_box["x"]
            assert text_box["x"] + text_box["width"] <= box["x"] + box["width"]


def test_a_value_between_unknown_ones_is_a_dot_under_its_own_scale(view):
    chart = view.locator("section#training figure > svg").first
    dots = chart.locator("circle")
    assert dots.count() == len(view.locator("section#training figure.joint").all())
    assert "7.8e\u22125" in chart.locator("text").all_text_contents()
    box = chart.bounding_box()
    for dot in dots.all():
        dot_box = dot.bounding_box()
        assert dot_box["width"] > 3
        middle = dot_box["x"] + dot_box["width"] / 2
        assert box["x"] + 0.4 * box["width"] < middle < box["x"] + 0.7 * box["width"]


def test_in_a_comparison_colours_are_networks_and_dashes_are_seeds(browser, tmp_path):
    runs = [{"network": network, "seed": seed} for network in (0, 1) for seed in (0, 1)]
    chart = {"title": "Top-1 accuracy", "unit": "%", "lines": [[50.0, 60.0]] * 4}
    comparison = {
        "sentences": [],
        "notes": [],
        "tables": [],
        "networks": ["as it is", "9x9"],
        "seeds": [3, 5],
        "runs": runs,
        "epochs": [1, 2],
        "charts": [chart],
    }
    content = {
        "title": "two",
        "subtitle": "",
        "facts": [],
        "comparison": comparison,
        "histories": [],
    }
    (tmp_path / "comparison.html").write_text(filled_page(content))
    page = browser.new_page()
    page.goto((tmp_path / "comparison.html").as_uri())

    def line_style(path):
        return [path.get_attribute(name) for name in ("stroke", "stroke-dasharray", "stroke-width")]

    curves = [line_style(path) for path in page.locator("figure path:has(title)").all()]
    assert len(curves) == 4
    colours, dashes, widths = zip(*curves, strict=True)
    assert colours[0] == colours[1] != colours[2] == colours[3]
    assert dashes[0] == dashes[2] != dashes[1] == dashes[3]
    assert float(widths[0]) > float(widths[2])  # so that an equal curve does not hide it
    entries = page.locator(".legend li")
    assert entries.all_inner_texts() == ["as it is", "9x9", "seed 3", "seed 5"]
    legend = [line_style(path) for path in page.locator(".legend path").all()]
    assert legend[:2] == [curves[0], curves[2]]
    assert [style[1] for style in legend[2:]] == [dashes[0], dashes[1]]

    chart = page.locator("figure > svg")
    assert "over epochs 1 to 2" in chart.get_attribute("aria-label")
    assert "epoch" in chart.locator("text").all_text_contents()
    chart.hover(position={"x": 5, "y": 40})
    assert page.locator(".readout").inner_text().startswith("epoch 1: as it is, seed 3 50, ")
    page.close()


@pytest.mark.parametrize(("name", "has_several"), [("dense", True), ("untied", False)])
def test_kernels_show_their_input_channel_if_there_are_several(
    browser, tmp_path, name, has_several
):
    """Kernels of the first input channel show it, too."""
    pictures = pictures_of(*model_and_plan(name))
    (tmp_path / "kernels.html").write_text(page_text(pictures))
    page = browser.new_page()
    page.goto((tmp_path / "kernels.html").as_uri())
    figure = page.locator("figure.layer").first
    channels = pictures.kernels[0].channels
    assert has_several == ({input_channel for _, input_channel in channels} > {0})
    for output_channel, input_channel in channels:
        text = figure.locator(".readout").inner_text()
        assert text.startswith(f"Kernel of output channel {output_channel}")
        assert (f", input channel {input_channel}: " in text) == has_several
        figure.locator("canvas").press("ArrowRight")
    page.close()


def test_choosing_a_kernel_shows_its_elements(view):
    figure = view.locator("figure.layer").first
    canvas, readout, elements = (figure.locator(part) for part in ("canvas", ".readout", "circle"))
    first = readout.inner_text()
    count = elements.count()
    assert f"{count} elements" in first
    box = canvas.bounding_box()
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": box["width"] / 2, "y": 20})
    assert readout.inner_text() != first
    assert elements.count() == count
    canvas.click(position={"x": 20, "y": 20})
    assert readout.inner_text() == first
    canvas.press("ArrowRight")
    assert readout.inner_text() not in (first, "")
    elements.first.dispatch_event("pointerenter")
    assert readout.inner_text().startswith("weight ")


def test_a_heat_map_says_what_it_shows_and_how_many_elements_are_where_the_pointer_is(view):
    figure = view.locator("figure.joint").first
    text = " ".join(figure.inner_text().split())
    for part in (
        "of 26 elements in 9x9 cells",
        "cells along row and column; mean distance",
        "% if spread evenly",
    ):
        assert part in text
    image = figure.locator("image").first
    image.scroll_into_view_if_needed()
    image.hover()
    assert "row 0, column 0: " in figure.locator(".readout").inner_text()


def test_the_slider_moves_the_elements(view):
    section = view.locator("section", has=view.get_by_role("heading", name="Training"))
    dot = section.locator("figure.joint circle").first
    before = dot.bounding_box()
    section.locator("input").fill("4")
    assert dot.bounding_box()["x"] > before["x"]
    assert section.locator("output").inner_text() == "step 4"
    section.get_by_role("button").click()
    assert section.get_by_role("button").inner_text() == "Pause"
    section.get_by_role("button", name="Play").wait_for()
    assert section.locator("output").inner_text() == "step 4"


def test_another_scheme_redraws_the_canvases(view):
    canvas = view.locator("figure.layer canvas").first
    before = canvas.evaluate("canvas => canvas.toDataURL()")
    dark = view.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    view.emulate_media(color_scheme="light" if dark else "dark")
    view.wait_for_function(
        "before => document.querySelector('figure.layer canvas').toDataURL() !== before", arg=before
    )
