"""The README.md of a checkpoint folder, and the lines of Python that load it."""

from collections.abc import Container

from .. import __version__
from ..networks.source import REGISTRIES
from ..reports.report import ConversionReport
from .folder import PAGE, PICTURE

FOLDED = (
    "The model is folded: the kernels are constructed and stored in plain convolutions of the "
    "windows' sizes; positions can no longer be learnt. "
)
LOAD_BY_TIMM_PLUGIN = """import timm
import dcls_convert  # registers the architecture with timm

model = timm.create_model("local-dir:{folder}", pretrained=True, num_classes=10)
"""


def model_card(
    report: ConversionReport, loading: str, files: str, *, pictures: Container[str] = ()
) -> str:
    """README.md of a folder: what the model is, its numbers, and how to load it.

    Args:
        report: The numbers.
        loading: Lines of Python, with `{folder}` for the folder.
        files: A sentence about the other files there.
        pictures: Names of the folder's pictures.
    """
    from ..views.report import report_markdown

    name = report.model or "a model"
    title = "with learnable element positions"
    folding = ""
    if report.folded:
        title = "folded from learnable element positions"
        folding = FOLDED
    shown_pictures = ""
    if PICTURE in pictures:
        shown_pictures += f"![Where the elements are in their windows]({PICTURE})\n\n"
    if PAGE in pictures:
        shown_pictures += f"`{PAGE}` shows positions and kernels.\n\n"
    return (
        "---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        "([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): "
        "each has a few weights, at learned positions in a larger window. "
        f"{folding}Made by dcls-convert {__version__}.\n\n"
        f"{shown_pictures}{report_markdown(report)}\n## Loading\n\n"
        "`dcls-model` is this folder:\n\n"
        f"```python\n{loading.format(folder='dcls-model')}```\n\n"
        f"{files}\n"
    )


def loading_code(model: str | None) -> str:
    """Lines of Python that load a folder, with `{folder}` for its path.

    Args:
        model: The plan's; None if only its user can build it.
    """
    kind = (model or "").partition(":")[0]
    if kind == "timm":
        return LOAD_BY_TIMM_PLUGIN
    arguments = '"{folder}"'
    comment = ""
    if model is None:
        arguments += ", model=unconverted"
        comment = "  # which is built as before"
    elif kind not in REGISTRIES:
        arguments += ", trust_code=True"
    return f"import dcls_convert\n\nmodel = dcls_convert.load_converted({arguments}){comment}\n"


def training_code(model: str | None, *, trained: bool) -> str:
    """Lines of Python that load a folder, train its model, and save the result.

    Args:
        model: As for `loading_code`.
        trained: Whether the weights are trained; the learning rate is lower then.
    """
    lr = "1e-4" if trained else "1e-3"
    imports, _, loading = loading_code(model).partition("\n\n")
    return (
        f"import torch\n{imports}\n\n{loading}"
        f"parameters = dcls_convert.tuning.param_groups(model, lr={lr})"
        "  # keeps weight decay off the positions\n"
        "optimizer = torch.optim.AdamW(parameters)\n"
        "...  # train\n"
        'dcls_convert.save_converted(model, "{folder}", "{folder}-tuned")\n'
    )
