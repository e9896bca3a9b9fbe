"""The tensors that a network's forward takes: their description, and tensors like them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import PlanError
from ..text import shortened
from .input_tensors import MAX_INTEGER, Inputs, InputTensor, check_inputs

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
    inputs = tuple(_described(name, tensor) for name, tensor in named)
    check_inputs(inputs)
    return inputs


def _described(name: str | None, tensor: object) -> InputTensor:
    assert isinstance(tensor, Tensor)
    values = None
    has_values = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta)
    if has_values and tensor.dtype != torch.bool and tensor.numel():
        least = max(int(tensor.min()), -MAX_INTEGER)
        values = (least, min(int(tensor.max()), MAX_INTEGER))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return InputTensor(name=name, shape=tuple(tensor.shape), dtype=dtype, range=values)


def random_arguments(
    inputs: Inputs, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Arguments:
    """Return tensors of random values on the CPU, always the same for a seed.

    Floating-point values are normal and have the given dtype; integers are uniform in the range of
    the example's.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for tensor in inputs:
        values = _random_values(tensor, generator)
        tensors.append(values.to(dtype) if values.is_floating_point() else values)
    return _as_arguments(inputs, tensors)


def _random_values(tensor: InputTensor, generator: torch.Generator) -> Tensor:
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
