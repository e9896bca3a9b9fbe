"""The page of a checkpoint: positions, distances and kernels, drawn by plotly (extra `plot`).

plotly is imported late. Its script is part of the page, so the page needs no network.
"""

import html
from collections.abc import Mapping, Sequence
from string import Template
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..geometry import position_limits, size_text
from ..reports.number_text import before_after, percent, short_count
from ..reports.report import ConversionReport
from ..text import count_text, printable
from .elements import BINS_PER_CELL_OF_DISTANCE, LayerKernels, PositionPicture
from .history import CURVE_LABELS, HistoryPicture, TrackPicture
from .pictures import Pictures

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Colours that are clear on a white and on a black page.
BLUE = "rgb(51,136,222)"
RED = "rgb(226,75,66)"
AMBER = "rgb(240,170,20)"
GREY = "rgba(128,128,128,0.3)"
# Zero is transparent, so that it has the colour of the page.
NO_BLUE = "rgba(51,136,222,0)"
NO_RED = "rgba(226,75,66,0)"
COUNT_COLOURS = [[0, NO_BLUE], [1, BLUE]]
SIGNED_COLOURS = [[0, RED], [0.5, NO_RED], [0.5, NO_BLUE], [1, BLUE]]
WINDOW_HEIGHT = 370  # pixels
SLIDER_HEIGHT = 70  # pixels
CHART_HEIGHT = 300  # pixels
PLOTLY_CONFIG = {"displayModeBar": False, "responsive": True}
SHOW_AT_ONCE = {"mode": "immediate", "frame": {"duration": 0}, "transition": {"duration": 0}}
PAGE_TEMPLATE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>$title</title>
<style>
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 1200px; margin: 1rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
dl, .figures { display: grid; gap: 1rem; }
dl { grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr)); }
.figures { grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
dt, .note { opacity: 0.75; }
dd, figure { margin: 0; min-width: 0; }
.js-plotly-plot text { fill: CanvasText !important; }
.hoverlayer path { fill: Canvas !important; }
.scatterlayer .point { stroke: CanvasText !important; }
</style>
<script>$script</script>
</head>
<body>
<h1>$title</h1>
$body
<p class="note">Made by dcls-convert $version. This page uses no network.</p>
</body>
</html>
""")


def page(pictures: Pictures) -> str:
    """Return the page of a checkpoint as HTML. Names from the data cannot become tags."""
    from plotly.offline import get_plotlyjs

    parts = [_heading(pictures)]
    history = pictures.history
    if history is not None:
        parts += ["<h2>Training</h2>", _figures("training", _training_charts(history))]
    for index, positions in enumerate(pictures.positions):
        figures = {
            "Where the elements are; dashed: the old kernel": _heat_map(positions),
            "How far from the centre they are": _distances(positions),
        }
        if history is not None:
            moving = _moving_elements(history.tracks[index], history.moving_steps)
            figures["Some of the elements during the training"] = moving
        for layer in pictures.kernels:
            if layer.name in positions.row.layers:
                figures[_kernels_caption(layer)] = kernels_figure(layer)
        parts += [_positions_heading(positions), _figures(f"positions-{index}", figures)]
    return PAGE_TEMPLATE.substitute(
        title=_escaped(pictures.name),
        script=get_plotlyjs(),
        body="\n".join(parts),
        version=__version__,
    )


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _heading(pictures: Pictures) -> str:
    """Return the facts on the whole network, and what the pictures mean."""
    model = pictures.report.model or "a model"
    facts = []
    for name, value in _facts(pictures).items():
        facts.append(f"<div><dt>{name}</dt><dd>{_escaped(value)}</dd></div>")
    notes = (
        "Each kernel is drawn with its elements: a filled dot has a positive weight, a hollow one "
        "a negative weight. Blue cells are positive, red ones negative. The sliders choose the "
        "kernel, the strongest first."
    )
    if pictures.why_not_rebuilt is not None:
        notes += f" Kernels are made from the stored weights: {pictures.why_not_rebuilt}."
    return (
        f"<p>{_escaped(model)} with learnable element positions (DCLS)</p>\n"
        f"<dl>{''.join(facts)}</dl>\n<p>{_escaped(notes)}</p>"
    )


def _facts(pictures: Pictures) -> dict[str, str]:
    report = pictures.report
    inspection = pictures.inspection
    border_share = inspection.mean_over_elements("border_share")
    overlap_share = inspection.mean_over_elements("overlap_share")
    return {
        "Parameters": f"{before_after(report.params)} ({percent(report.params)})",
        "MACs for one image": _macs(report),
        "Layers replaced": f"{len(report.layers):,}",
        "Elements": f"{inspection.elements:,}",
        "At the window's border": f"{100 * border_share:.1f} %",
        "Overlapping": f"{100 * overlap_share:.1f} %",
    }


def _macs(report: ConversionReport) -> str:
    if report.macs.delta is None:
        return "not counted"
    return f"{before_after(report.macs, short_count)} ({percent(report.macs)})"


def _positions_heading(positions: PositionPicture) -> str:
    """Return the name of a tie group or layer, and a line with its statistics."""
    row = positions.row
    statistics = (
        f"{count_text(len(row.layers), 'layer')}; {row.kernel_count} elements in "
        f"{size_text(row.dilated_size)}; mean distance from the centre {row.mean_distance:.2f} "
        f"cells; {100 * row.border_share:.1f} % at the border"
    )
    return f"<h2>{_escaped(row.name)}</h2>\n<p>{_escaped(statistics)}</p>"


def _figures(name: str, figures: Mapping[str, "Figure"]) -> str:
    """Return figures by caption; `name` makes their ids on the page unique."""
    drawn = []
    for index, (caption, figure) in enumerate(figures.items()):
        content = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            auto_play=False,
            config=PLOTLY_CONFIG,
            default_height=f"{figure.layout.height}px",
            div_id=f"{name}-{index}",
        )
        caption_tag = f"<figcaption>{_escaped(caption)}</figcaption>"
        drawn.append(f"<figure>{caption_tag}{content}</figure>\n")
    return f'<div class="figures">{"".join(drawn)}</div>'


def _new_figure(
    traces: Sequence[Any], height: int, frames: Sequence[Any] = (), **layout: Any
) -> "Figure":
    """Return a figure on the page's own background."""
    from plotly.graph_objects import Figure

    figure = Figure(list(traces), frames=list(frames))
    figure.update_layout(
        height=height,
        template="none",
        dragmode=False,
        showlegend=False,
        paper_bgcolor=NO_BLUE,
        plot_bgcolor=NO_BLUE,
        margin={"l": 45, "r": 10, "t": 10, "b": 45},
        **layout,
    )
    figure.update_xaxes(gridcolor=GREY, zeroline=False)
    figure.update_yaxes(gridcolor=GREY, zeroline=False)
    return figure


def _window_axes(size: Sequence[int]) -> dict[str, Any]:
    """Return the layout of a window (..., rows, columns), with square cells and row 0 on top."""
    top, bottom = position_limits((1, *size)[-2])
    left, right = position_limits(size[-1])
    return {
        "xaxis": {"range": [left - 0.5, right + 0.5], "title": "column", "constrain": "domain"},
        "yaxis": {
            "range": [bottom + 0.5, top - 0.5],
            "title": "row",
            "scaleanchor": "x",
            "constrain": "domain",
        },
    }


def _cells(values: Any, size: Sequence[int], bins_per_cell: int = 1) -> dict[str, Any]:
    """Return the values (rows, columns) of a heat map, and where they are, in cells."""
    middle_of_first_bin = 0.5 / bins_per_cell - 0.5
    return {
        "z": values,
        "x0": position_limits(size[-1])[0] + middle_of_first_bin,
        "y0": position_limits((1, *size)[-2])[0] + middle_of_first_bin,
        "dx": 1 / bins_per_cell,
        "dy": 1 / bins_per_cell,
        "showscale": False,
    }


def _heat_map(positions: PositionPicture) -> "Figure":
    """Draw how many elements are where, with the old kernels as dashed rectangles."""
    from plotly.graph_objects import Heatmap

    cells = Heatmap(
        **_cells(positions.heat.int().numpy(), positions.size, positions.bins_per_cell),
        colorscale=COUNT_COLOURS,
        hovertemplate="row %{y:.2f}, column %{x:.2f}: %{z} elements<extra></extra>",
    )
    figure = _new_figure([cells], WINDOW_HEIGHT, **_window_axes(positions.size))
    for size in positions.old_kernel_sizes:
        top, bottom = position_limits((1, *size)[-2])
        left, right = position_limits(size[-1])
        dashed = {"color": AMBER, "dash": "dash"}
        figure.add_shape(x0=left - 0.5, x1=right + 0.5, y0=top - 0.5, y1=bottom + 0.5, line=dashed)
    return figure


def _distances(positions: PositionPicture) -> "Figure":
    """Draw how many elements are at each distance from the centre."""
    from plotly.graph_objects import Bar

    bars = Bar(
        y=positions.distances,
        x0=0.5 / BINS_PER_CELL_OF_DISTANCE,
        dx=1 / BINS_PER_CELL_OF_DISTANCE,
        marker={"color": BLUE},
        hovertemplate="about %{x} cells: %{y} elements<extra></extra>",
    )
    figure = _new_figure([bars], WINDOW_HEIGHT)
    figure.update_xaxes(title="cells from the centre")
    figure.update_yaxes(title="elements")
    return figure


def _dots(columns: Sequence[Any], rows: Sequence[Any], **settings: Any) -> Any:
    """Return elements as dots."""
    from plotly.graph_objects import Scatter

    marker = {"color": AMBER, "size": 6, "line": {"width": 1}, **settings.pop("marker", {})}
    return Scatter(x=columns, y=rows, mode="markers", marker=marker, **settings)


def _kernels_caption(layer: LayerKernels) -> str:
    drawn = len(layer.channels)
    return (
        f"{layer.name}: {drawn} of {count_text(layer.total, 'kernel')} "
        f"with {100 * layer.energy_share:.0f} % of the energy"
    )


def kernels_figure(layer: LayerKernels) -> "Figure":
    """Draw a layer's kernels with their elements; a slider chooses the kernel."""
    from plotly.graph_objects import Heatmap

    size = tuple(layer.cells.shape[1:])
    pictures = []
    for cells, positions, weights in zip(layer.cells, layer.positions, layer.weights, strict=True):
        largest = float(cells.abs().max()) or 1.0
        heat_map = Heatmap(
            **_cells(cells.numpy(), size),
            colorscale=SIGNED_COLOURS,
            zmin=-largest,
            zmax=largest,
            hovertemplate="row %{y}, column %{x}: %{z:.3g}<extra></extra>",
        )
        symbols = ["circle" if weight > 0 else "circle-open" for weight in weights]
        dots = _dots(
            positions[:, 1].numpy(),
            positions[:, 0].numpy(),
            marker={"symbol": symbols},
            customdata=weights.numpy(),
            hovertemplate="row %{y:.2f}, column %{x:.2f}: weight %{customdata:.3g}<extra></extra>",
        )
        pictures.append([heat_map, dots])
    has_inputs = any(channel > 0 for _, channel in layer.channels)
    names = []
    for output_channel, input_channel in layer.channels:
        name = f"output channel {output_channel}"
        if has_inputs:
            name += f", input channel {input_channel}"
        names.append(name)
    return _with_slider(pictures, names, size)


def _moving_elements(track: TrackPicture, steps: Sequence[int]) -> "Figure":
    """Draw the elements that a tracker followed; a slider chooses the step of the training."""
    pictures = []
    for coordinates in track.frames:
        columns = coordinates[-1]
        rows: Sequence[float | None] = [0.0] * len(columns)
        if len(coordinates) > 1:
            rows = coordinates[-2]
        pictures.append([_dots(columns, rows)])
    return _with_slider(pictures, [f"step {step:,}" for step in steps], track.size)


def _with_slider(
    pictures: Sequence[Sequence[Any]], names: Sequence[str], size: Sequence[int]
) -> "Figure":
    """Return a figure that shows one of several pictures of a window, which a slider chooses.

    Args:
        pictures: The traces of each picture; the first is shown at the start.
        names: The name of each picture.
        size: Cells of the window along the drawn axes.
    """
    from plotly.graph_objects import Frame

    frames = []
    steps = []
    for index, (traces, name) in enumerate(zip(pictures, names, strict=True)):
        frames.append(Frame(data=traces, name=str(index)))
        arguments = [[str(index)], SHOW_AT_ONCE]
        steps.append({"method": "animate", "label": name, "args": arguments})
    slider = {
        "steps": steps,
        "currentvalue": {"prefix": "", "font": {"color": "grey"}},
        "pad": {"t": 40},
        "bgcolor": GREY,
        "bordercolor": GREY,
        "activebgcolor": BLUE,
        "tickcolor": NO_BLUE,
        "font": {"color": NO_BLUE},  # of the ticks' labels, which would overlap
    }
    axes = _window_axes(size)
    height = WINDOW_HEIGHT + SLIDER_HEIGHT
    return _new_figure(pictures[0], height, frames, sliders=[slider], **axes)


def _training_charts(history: HistoryPicture) -> dict[str, "Figure"]:
    """Draw how fast the positions moved, how far they spread, and how many were at the border."""
    from plotly.graph_objects import Scatter

    figures = {}
    for field, label in CURVE_LABELS.items():
        curves = []
        for track in history.tracks:
            curve = Scatter(
                x=history.steps,
                y=getattr(track, field),
                name=_escaped(track.name),
                mode="lines+markers",  # no line leads to a known value between unknown ones
            )
            curves.append(curve)
        figure = _new_figure(curves, CHART_HEIGHT)
        figure.update_xaxes(title="step")
        figure.update_layout(
            showlegend=True, legend={"orientation": "h", "yanchor": "bottom", "y": 1}
        )
        figures[label.capitalize()] = figure
    return figures
