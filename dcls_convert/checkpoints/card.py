"""The README.md of a checkpoint folder, and the lines of Python that load it."""

from collections.abc import Container

from .. import __version__
from ..networks.source import REGISTRIES
from ..reports.report import ConversionReport
from .folder import PAGE, PICTURE


def model_card(
    report: ConversionReport, loading: str, files: str, *, pictures: Container[str] = ()
) -> str:
    """README.md of a folder: what the model is, its numbers, the lines that load it, what else lies there."""
    from ..views.report import report_markdown

    name = report.model or "a model"
    title = (
        "folded from learnable element positions"
        if report.folded
        else "with learnable element positions"
    )
    folding = (
        "The model is folded: the kernels are constructed once and for all, and stand in plain convolutions of the "
        "windows' sizes; no positions are left to be learnt. "
    )
    shown = f"![Where the elements are in their windows]({PICTURE})\n\n" * (PICTURE in pictures)
    shown += f"`{PAGE}` shows positions and kernels.\n\n" * (PAGE in pictures)
    return (
        f"---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        f"([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): each has a few weights, at learned positions in a "
        f"larger window. {folding * report.folded}"
        f"Made by dcls-convert {__version__}.\n\n"
        f"{shown}{report_markdown(report)}\n## Loading\n\n"
        f"Where this folder is `dcls-model` below:\n\n```python\n{loading.format(folder='dcls-model')}```\n\n"
        f"{files}\n"
    )


def loading_code(model: str | None) -> str:
    """The lines that load a folder, to be formatted with `folder`, for the plan's `model`."""
    kind = (model or "").partition(":")[0]
    if kind == "timm":
        return (
            "import timm\nimport dcls_convert  # registers the architecture with timm\n\n"
            'model = timm.create_model("local-dir:{folder}", pretrained=True, num_classes=10)\n'
        )
    how = "" if kind in REGISTRIES else ", trust_code=True" if model else ", model=unconverted"
    built = "" if kind in REGISTRIES or model else "  # which is built as before"
    return f'import dcls_convert\n\nmodel = dcls_convert.load_converted("{{folder}}"{how}){built}\n'


def training_code(model: str | None, *, trained: bool) -> str:
    """As `loading_code`, with an optimizer, at a rate for trained weights or others, and lines that save the result."""
    lr = "1e-4" if trained else "1e-3"
    imports, _, loading = loading_code(model).partition("\n\n")
    return (
        f"import torch\n{imports}\n\n{loading}"
        f"parameters = dcls_convert.tuning.param_groups(model, lr={lr})  # keeps weight decay off the positions\n"
        "optimizer = torch.optim.AdamW(parameters)\n"
        "...  # train\n"
        'dcls_convert.save_converted(model, "{folder}", "{folder}-tuned")\n'
    )
