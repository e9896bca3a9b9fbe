"""`dcls-convert inspect`: where a checkpoint's elements are."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from ..atomic_output import check_output, new_file, reason_not_a_file
from ..input_files import check_file, check_images
from ..options import FigureName
from ..picture_output import check_picture
from . import console
from .network_options import refuse
from .shared_options import CheckpointFolder, Force, Json, TrustCode
from .typer_options import OUTPUT, choice, image_size, option

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ..checkpoints.folder import Checkpoint
    from ..checkpoints.inspection import Inspection
    from ..progress import Notify

PICTURES = "Pictures"  # a group of options in --help
PAGE_HELP = "Write a page of pictures: positions, kernels, effective receptive field, cost."
FIGURE_HELP = "Draw one figure into a .png, .svg or .pdf (extra plot)."
HISTORY = option(
    PICTURES,
    "Record that a PositionTracker wrote in training: printed, and drawn by --html.",
    metavar="positions.jsonl",
)
FOR_RECEPTIVE_FIELD = "for the effective receptive field"
IMAGES = option(
    PICTURES, f"Images {FOR_RECEPTIVE_FIELD}.", metavar="FOLDER", show_default="seeded noise"
)
ORIGINAL = option(
    PICTURES, "Weights of the network before conversion, to compare with.", metavar="FILE"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureOptions:
    """The options that concern pictures."""

    html: Path | None
    picture: Path | None
    figure: FigureName
    history: Path | None
    images: Path | None
    original: Path | None
    input_size: Any

    @property
    def outputs(self) -> list[Path]:
        """Files to write."""
        return [path for path in (self.html, self.picture) if path is not None]

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures to draw: all of them on a page, or the one of a picture."""
        if self.html is not None:
            return get_args(FigureName)
        if self.picture is not None:
            return (self.figure,)
        return ()

    def check(self) -> None:
        """Refuse options without effect, pictures that cannot be drawn, and missing files."""
        describes_field = self.images or self.original or self.input_size
        refuse(
            (
                self.figure != "positions" and self.picture is None,
                "--figure says what --picture draws",
            ),
            (
                self.figure == "history" and self.history is None,
                "--figure history needs --history",
            ),
            (
                describes_field and "receptive-field" not in self.figures,
                "--images, --original and --input-size are for --html, "
                "or --picture with --figure receptive-field",
            ),
        )
        if self.picture is not None:
            check_picture(self.picture, "--picture")
        if self.images is not None:
            check_images(self.images, "images")
        if self.original is not None:
            check_file(self.original, "original")
        if self.history is not None:
            check_file(self.history, "history")

    def draw(
        self,
        checkpoint: "Checkpoint",
        notify: "Notify",
        *,
        force: bool,
        trust_code: bool,
    ) -> "Inspection":
        """Write the pictures of a checkpoint, and return the statistics of its positions."""
        from ..views.page import page, pictures_of_folder
        from ..views.plot import draw
        from ..views.receptive_field import ReceptiveFieldOptions

        field_options = None
        if "receptive-field" in self.figures:
            field_options = ReceptiveFieldOptions(self.images, self.original, self.input_size)
        pictures = pictures_of_folder(
            checkpoint, field_options, self.history, notify, console.note, trust_code=trust_code
        )
        notify("writing")
        if self.html is not None:
            with new_file(self.html, force=force) as partial:
                partial.write_bytes(page(pictures).encode())
        if self.picture is not None:
            with new_file(self.picture, force=force) as partial:
                partial.write_bytes(draw(pictures, self.figure, self.picture.suffix))
        return pictures.inspection


def inspect(
    checkpoint: CheckpointFolder,
    json_: Json = False,
    plan: Annotated[
        bool, option(OUTPUT, "Print the checkpoint's plan as JSON instead.", "--plan")
    ] = False,
    html: Annotated[Path | None, option(PICTURES, PAGE_HELP, metavar="FILE")] = None,
    picture: Annotated[Path | None, option(PICTURES, FIGURE_HELP, metavar="FILE")] = None,
    figure: Annotated[
        FigureName, choice(FigureName, PICTURES, "Which figure --picture draws.")
    ] = "positions",
    history: Annotated[Path | None, HISTORY] = None,
    images: Annotated[Path | None, IMAGES] = None,
    original: Annotated[Path | None, ORIGINAL] = None,
    input_size: Annotated[
        Any, image_size(PICTURES, f"Image size {FOR_RECEPTIVE_FIELD}; the paper's is 3x1024x1024.")
    ] = None,
    force: Force = False,
    trust_code: TrustCode = False,
) -> None:
    """Show where a checkpoint's elements are: at the border, overlapping, far from the centre."""
    pictures = PictureOptions(
        html=html,
        picture=picture,
        figure=figure,
        history=history,
        images=images,
        original=original,
        input_size=input_size,
    )
    outputs = pictures.outputs
    refuse(
        (plan and json_, "--plan and --json exclude each other; the plan is JSON"),
        (plan and outputs, "--plan prints the plan alone; omit --html and --picture"),
        (force and not outputs, "--force has no effect without --html or --picture"),
        (
            history and "history" not in pictures.figures and (plan or json_),
            "--history is printed as text; omit --plan and --json",
        ),
    )
    pictures.check()
    for path in outputs:
        check_output(path, force=force, reason_to_keep=reason_not_a_file)

    with console.steps(checkpoint, "reading", lines=bool(outputs)) as notify:
        from ..checkpoints.folder import open_checkpoint
        from ..checkpoints.inspection import inspect_checkpoint, plan_with_positions
        from ..views.history import history_view, read_checkpoint_history

        opened = open_checkpoint(checkpoint)
        views: list[RenderableType] = []
        if history is not None:
            views = [
                "",
                history_view(read_checkpoint_history(history, plan_with_positions(opened))),
            ]
        if plan:
            text = opened.plan.to_json()
        elif outputs:
            inspection = pictures.draw(opened, notify, force=force, trust_code=trust_code)
        else:
            inspection = inspect_checkpoint(opened)
    if plan:
        console.write(text)
    elif json_:
        console.write(inspection.to_json())
    else:
        _show(inspection, views, outputs)


def _show(inspection: "Inspection", views: list["RenderableType"], outputs: list[Path]) -> None:
    """Print the inspection as a table, then other views, and the files that were written."""
    from ..views.inspection import inspection_view

    lines = []
    for path in outputs:
        lines.append(f"Wrote {path} ({path.stat().st_size / 1e6:.2f} MB).")
    if lines:
        lines = ["", *lines]
    console.show(inspection_view(inspection), *views, *lines)
