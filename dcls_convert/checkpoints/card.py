"""The README.md of a checkpoint folder."""

from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..conversion.provenance import provenance_lines
from ..reports.report import ConversionReport, report_markdown
from ..text import printable
from .folder import PICTURE
from .loading_code import with_folder

FOLDED = (
    "The model is folded: the kernels are constructed and stored in plain convolutions of the "
    "windows' sizes; positions can no longer be learnt. "
)
# The paper, and this program. README and docs/index.md show the same entries.
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
        with_picture: Show the picture that the folder has.
        provenance: How the model was converted, if that is known.
    """
    name = report.model or "a model"
    package = "timm"
    if "dcls_convert" in loading:
        package = "dcls-convert, as its README says"
    title = "with learnable element positions"
    folding = ""
    if report.folded:
        title = "folded from learnable element positions"
        folding = FOLDED
    picture = ""
    if with_picture:
        picture = f"![Where the elements are in their windows, and kernels]({PICTURE})\n\n"
    return (
        "---\nlibrary_name: timm\ntags:\n- image-classification\n- timm\n- dcls\n---\n"
        f"# {name} {title} (DCLS)\n\n"
        f"Convolutions of {name} are replaced by dilated convolutions with learnable spacings "
        "([arXiv:2112.03740](https://arxiv.org/abs/2112.03740)): "
        "each has a few weights, at learned positions in a larger window. "
        f"{folding}Made by dcls-convert {__version__}.\n\n"
        f"{picture}{report_markdown(report)}\n## Loading\n\n"
        f"Install {package}. Then, in the folder that has this one, `{printable(folder)}`:\n\n"
        f"```python\n{with_folder(loading, folder)}```\n\n"
        f"{files}\n"
        f"{_conversion_section(provenance)}"
        f"\n## Citation\n\n```bibtex\n{CITATION}```\n"
    )


def _conversion_section(provenance: Mapping[str, Any] | None) -> str:
    """Return the section about how the model was converted; empty if that is not known."""
    if provenance is None:
        return ""
    lines = "\n".join(provenance_lines(provenance))
    return f"\n## Conversion\n\n```text\n{lines}\n```\n"
