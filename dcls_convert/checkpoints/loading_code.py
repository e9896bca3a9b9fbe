"""Python code that loads a checkpoint folder or trains its model, for model cards and messages."""

import json

from ..networks.source import REGISTRIES

LOAD_BY_TIMM_PLUGIN = """import timm
import dcls_convert  # registers the architecture with timm

model = timm.create_model("local-dir:{folder}", pretrained=True)
"""


def loading_code(model: str | None) -> str:
    """Return lines of Python that load a folder, with `{folder}` for its path.

    Args:
        model: The plan's model; None if only its user can build it.
    """
    kind = (model or "").partition(":")[0]
    if kind == "timm":
        return LOAD_BY_TIMM_PLUGIN
    arguments = '"{folder}"'
    comment = ""
    if model is None:
        arguments += ", model=unconverted"
        comment = "  # your unconverted model"
    elif kind not in REGISTRIES:
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
        f"import torch\n{imports}\n\n{loading}"
        "# Positions learn faster and do not decay.\n"
        f"parameters = dcls_convert.tuning.param_groups(model, lr={lr})\n"
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
