"""The README.md of a folder, and Python code that loads a folder or trains its model."""

import json
from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..conversion.provenance import provenance_lines
from ..networks.source import REGISTRIES
from ..reports.report import ConversionReport, report_markdown
from ..text import printable
from .folder import PICTURE

FOLDED = (
    "The model is folded: the kernels are constructed and stored in plain convolutions of the "
    "windows' sizes; positions can no longer be learnt. "
)
# The paper, and this program. README.md shows the same entries; a test compares them.
CITATION = """@inproceedings{khalfaoui-hassani2023dcls,
  title = {Dilated convolution with learnable spacings},
  author = {Khalfaoui-Hassani, Ismail and Pellegrini, Thomas and Masquelier, Timoth{\\'e}e},
  booktitle = {The Eleventh International Conference on Learning Representations (ICLR)},
  year = {2023},
  url = {https://arxiv.org/abs/2112.03740},
}
@software{dcls-convert,
  title = {dcls-convert},
  author = {{The authors of dcls-convert}},
  version = {VERSION},
}
""".replace("VERSION", __version__)
LOAD_BY_TIMM_PLUGIN = """import timm
import dcls_convert  # registers the architecture with timm

model = timm.create_model("local-dir:{folder}", pretrained=True)
"""


def model_card(
    report: ConversionReport,
    loading: str,
    files: str,
    *,
    folder: str,
    with_picture: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> str:
    """Return the README.md of a folder: what the model is, its costs, how to load and cite it.

    Args:
        report: The report with the costs.
        loading: Lines of Python that load the folder, with `{folder}` for its path.
        files: A sentence about the other files in the folder.
        folder: The folder's name.
        with_picture: Whether to show the folder's picture.
        provenance: How the model was converted; None if unknown.
    """
    name = report.model or "a model"
    package = "timm"
    if "dcls_convert" in loading:
        package = "dcls-convert, as its README says"
    title = "with learnable element positions"
    folding = ""
    if report.plan.folded:
        title = "folded from learnable element positions"
        folding = FOLDED
    picture = ""
    if with_picture:
        picture = f"![Where the elements are in their windows, and kernels]({PICTURE})\n\n"
    conversion = ""
    if provenance is not None:
        lines = "\n".join(provenance_lines(provenance))
        conversion = f"\n## Conversion\n\n```text\n{lines}\n```\n"
    metadata = "tags:\n- dcls\n"
    if report.plan.source is not None and report.plan.source.prefix == "timm":
        metadata = "library_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n"
    return (
        f"---\n{metadata}---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        "([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): "
        "each has a few weights, at learned positions in a larger window. "
        f"{folding}Made by dcls-convert {__version__}.\n\n"
        f"{picture}{report_markdown(report)}\n## Loading\n\n"
        f"Install {package}. Then, in the folder that has this one, `{printable(folder)}`:\n\n"
        f"```python\n{with_folder(loading, folder)}```\n\n"
        f"{files}\n{conversion}\n## Citation\n\n```bibtex\n{CITATION}```\n"
    )


def loading_code(model: str | None) -> str:
    """Return lines of Python that load a folder, with `{folder}` for its path.

    Args:
        model: The plan's model; None if only its user can build it.
    """
    prefix = (model or "").partition(":")[0]
    if prefix == "timm":
        return LOAD_BY_TIMM_PLUGIN
    arguments = '"{folder}"'
    comment = ""
    if model is None:
        arguments += ", model=unconverted"
        comment = "  # your unconverted model"
    elif prefix not in REGISTRIES:
        arguments += ", trust_code=True"
    return f"import dcls_convert\n\nmodel = dcls_convert.load_converted({arguments}){comment}\n"


def training_code(model: str | None, *, trained: bool) -> str:
    """Return lines of Python that load a folder, train its model, and save the result.

    Args:
        model: As for `loading_code`.
        trained: Whether the weights are trained. If so, the learning rate is lower.
    """
    lr = "1e-4" if trained else "1e-3"
    imports, _, loading = loading_code(model).partition("\n\n")
    return (
        f"import torch\n{imports}\n\n"
        "# If this folder exists, fail now, not after the training.\n"
        'dcls_convert.check_output("{folder}-tuned")\n'
        f"{loading}"
        "# Positions learn faster and do not decay.\n"
        f"parameters = dcls_convert.tuning.param_groups(model, lr={lr}, weight_decay=0.05)\n"
        "optimizer = torch.optim.AdamW(parameters)\n"
        "...  # train\n"
        'dcls_convert.save_converted(model, "{folder}", "{folder}-tuned")\n'
    )


def with_folder(code: str, folder: object) -> str:
    """Put the folder's name for "{folder}" into lines of Python, inside a string literal.

    The result is valid Python, whatever characters the name has.
    """
    text = str(folder)
    literal = json.dumps(text, ensure_ascii=not text.isprintable())
    return code.format(folder=literal[1:-1])
