"""The tensors that a network's forward takes by position: examples of them, and their names."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..input_sizes import InputSizes, each_size
from ..text import count_text, join_with_and

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

Inputs = tuple[Tensor, ...]  # one tensor (batch, *size) for each input


def random_inputs(input_size: InputSizes, batch: int, *, seed: int = 0) -> Inputs:
    """Return normal random numbers for a batch of this many, in float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for size in each_size(input_size):
        inputs.append(torch.randn(batch, *size, generator=generator, device="cpu"))
    return tuple(inputs)


def meta_inputs(input_size: InputSizes, batch: int, dtype: torch.dtype) -> Inputs:
    """Return tensors without values for a batch of this many."""
    inputs = []
    for size in each_size(input_size):
        inputs.append(torch.empty(batch, *size, dtype=dtype, device="meta"))
    return tuple(inputs)


def why_not_called_with(model: nn.Module, count: int) -> str | None:
    """Say what forward takes, if it cannot be called with this many tensors by position.

    Return None if it can be called so, or if its signature does not say what it takes.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # code without a signature, such as a scripted module's
        return None
    try:
        signature.bind(*range(count))
    except TypeError:
        return _what_is_taken([*signature.parameters.values()])
    return None


def _what_is_taken(parameters: Sequence[inspect.Parameter]) -> str:
    """Say which inputs a forward takes: "forward takes 2 inputs (image, mask)"."""
    required: list[str] = []
    optional: list[str] = []
    by_keyword: list[str] = []
    for parameter in parameters:
        has_default = parameter.default is not parameter.empty
        if parameter.kind in BY_POSITION and has_default:
            optional.append(parameter.name)
        elif parameter.kind in BY_POSITION:
            required.append(parameter.name)
        elif parameter.kind == parameter.KEYWORD_ONLY and not has_default:
            by_keyword.append(parameter.name)
    if by_keyword:
        return (
            f"forward takes {join_with_and(by_keyword)} by keyword alone, and networks are run "
            "with tensors by position"
        )
    number = count_text(len(required), "input")
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        number = f"at least {number}"
    elif optional:
        number = f"{len(required)} to {count_text(len(required) + len(optional), 'input')}"
    return f"forward takes {number} ({', '.join([*required, *optional])}); state a size for each"


def input_names(model: nn.Module, count: int) -> tuple[str, ...]:
    """Return names for the inputs of an exported model: those of forward's parameters.

    The only input is "input". Inputs without a name of their own are numbered.
    """
    if count == 1:
        return ("input",)
    names: list[str] = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in BY_POSITION:
            names.append(parameter.name)
    for number in range(len(names), count):
        names.append(f"input_{number}")
    return tuple(names[:count])
