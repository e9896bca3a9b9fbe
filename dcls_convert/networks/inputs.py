"""The tensors that a network's forward takes: their description, and tensors like them."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..text import shortened
from .input_tensors import DtypeName, Inputs, InputTensor

BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# One tensor, several by position, or tensors by the names of forward's parameters.
ExampleInputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Arguments:
    """What forward is called with: `model(*arguments.args, **arguments.kwargs)`."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of their description."""
        return (*self.args, *self.kwargs.values())

    def to(self, dtype: torch.dtype) -> "Arguments":
        """Return the tensors, those of floating point with this dtype."""
        args = [_with_dtype(tensor, dtype) for tensor in self.args]
        kwargs = {name: _with_dtype(tensor, dtype) for name, tensor in self.kwargs.items()}
        return Arguments(tuple(args), kwargs)


def _with_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def describe_inputs(example_inputs: ExampleInputs) -> Inputs:
    """Return what describes a user's example inputs.

    Raises:
        PlanError: They are anything else than tensors, a sequence of them, or a mapping of them.
    """
    named: list[tuple[str | None, object]]
    if isinstance(example_inputs, Tensor):
        named = [(None, example_inputs)]
    elif isinstance(example_inputs, Mapping):
        named = [*example_inputs.items()]
    elif isinstance(example_inputs, Sequence):
        named = [(None, tensor) for tensor in example_inputs]
    else:
        named = []
    if not named or not all(isinstance(tensor, Tensor) for _, tensor in named):
        raise PlanError(
            f"example inputs: found {shortened(repr(example_inputs), 120)}; give a tensor, a tuple "
            "of tensors, or a dict of tensors by the names of forward's parameters"
        )
    return tuple(_described(named))


def _described(named: Sequence[tuple[str | None, object]]) -> Iterator[InputTensor]:
    for name, tensor in named:
        assert isinstance(tensor, Tensor)
        dtype: Any = str(tensor.dtype).removeprefix("torch.")
        if dtype not in get_args(DtypeName):
            raise PlanError(f"example inputs: {dtype} is not supported")
        values = None
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if is_integer and tensor.dtype != torch.bool and tensor.numel():
            values = (int(tensor.min()), int(tensor.max()))
        yield InputTensor(name=name, shape=tuple(tensor.shape), dtype=dtype, range=values)


def random_arguments(inputs: Inputs, *, seed: int = 0) -> Arguments:
    """Return tensors of random values on the CPU, always the same for a seed.

    Floating-point values are normal, integers uniform in the range of the example's.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [_random_tensor(tensor, generator) for tensor in inputs]
    return _as_arguments(inputs, tensors)


def _random_tensor(tensor: InputTensor, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(tensor.shape, generator=generator, dtype=dtype, device="cpu")
    least, most = tensor.range or (0, 1)
    values = torch.randint(least, most + 1, tensor.shape, generator=generator, device="cpu")
    return values.to(dtype)


def meta_arguments(inputs: Inputs, dtype: torch.dtype) -> Arguments:
    """Return tensors without values; those of floating point have the given dtype."""
    tensors = []
    for tensor in inputs:
        own: torch.dtype = getattr(torch, tensor.dtype)
        if own.is_floating_point:
            own = dtype
        tensors.append(torch.empty(tensor.shape, dtype=own, device="meta"))
    return _as_arguments(inputs, tensors)


def _as_arguments(inputs: Inputs, tensors: Sequence[Tensor]) -> Arguments:
    args = []
    kwargs = {}
    for description, tensor in zip(inputs, tensors, strict=True):
        if description.name is None:
            args.append(tensor)
        else:
            kwargs[description.name] = tensor
    return Arguments(tuple(args), kwargs)


def input_names(model: nn.Module, inputs: Inputs) -> tuple[str, ...]:
    """Return names for the inputs of an exported model: those of forward's parameters.

    The only input is "input". Inputs without a name of their own are numbered.
    """
    if len(inputs) == 1:
        return ("input",)
    parameters = [*inspect.signature(model.forward).parameters.values()]
    names = []
    for index, tensor in enumerate(inputs):
        name = tensor.name
        if name is None:
            name = f"input_{index}"
            if index < len(parameters) and parameters[index].kind in BY_POSITION:
                name = parameters[index].name
        names.append(name)
    return tuple(names)
