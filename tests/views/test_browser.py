"""The page in a headless browser: it has no errors, uses no network, and everything is visible."""

import pytest
import torch

from dcls_convert import load_converted
from dcls_convert.tuning import PositionTracker

from ..command_line import run
from ..conftest import TINY

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("default")]

VIEWS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
MIN_SIDE = 150  # pixels of a figure


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    size = ["--dilated-size", 9, "--input-size", "3x64x64"]
    run(f"timm:{TINY}", *size, "-q", "--output", folder / "net")
    model = load_converted(folder / "net")
    tracker = PositionTracker(model, folder / "positions.jsonl")
    for step in range(5):
        tracker.update(step)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("positions"):
                    parameter.add_(0.3)
    history = ["--history", folder / "positions.jsonl"]
    run("inspect", folder / "net", "--html", folder / "page.html", *history)
    return folder / "page.html"


@pytest.fixture(params=VIEWS, ids=lambda view: "-".join(map(str, view)))
def view(request, browser, page_file):
    """The page in a browser; afterwards, it must have had no errors and no requests."""
    width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    problems = []
    requests = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_file.as_uri())
    yield page
    assert problems == []
    assert {url for url in requests if not url.startswith("data:")} == {page_file.as_uri()}
    context.close()


def test_every_figure_is_drawn_within_the_page_in_colours_of_the_scheme(view):
    width = view.viewport_size["width"]
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    figures = view.locator("figure").all()
    assert len(figures) > 10
    for figure in figures:
        assert figure.locator("figcaption").inner_text()
        box = figure.locator(".main-svg").first.bounding_box()
        assert min(box["width"], box["height"]) >= MIN_SIDE
        assert 0 <= box["x"] <= width - box["width"]
    ink = view.locator("body").evaluate("node => getComputedStyle(node).color")
    is_dark = view.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    assert ink == ("rgb(255, 255, 255)" if is_dark else "rgb(0, 0, 0)")
    for text in view.locator("figure text").all():
        assert text.evaluate("node => getComputedStyle(node).fill") == ink


def test_the_sliders_choose_kernels_and_steps(view):
    for caption, name in (("during the training", "step 4"), ("of the energy", "channel")):
        figure = view.locator("figure", has_text=caption).first
        dots = figure.locator(".scatterlayer .point")
        assert dots.count() > 5
        before = dots.first.bounding_box()
        rail = figure.locator(".slider-rail-touch-rect")
        rail.scroll_into_view_if_needed()
        box = rail.bounding_box()
        view.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
        view.wait_for_timeout(300)
        assert dots.first.bounding_box() != before
        assert name in figure.locator(".slider-label").first.text_content()
