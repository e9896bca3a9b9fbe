"""Describe the tensors that a network's forward takes, and make random tensors like them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import PlanError
from ..text import shortened
from .input_spec import MAX_INTEGER, InputSpec, TensorSpec, check_inputs

# One tensor, several by position, or tensors by the names of forward's parameters.
ExampleInputs = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments for a call of forward: `model(*arguments.args, **arguments.kwargs)`."""

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors, in the order of their description."""
        return (*self.args, *self.kwargs.values())

    def with_tensor(self, index: int, tensor: Tensor) -> "Arguments":
        """Return the arguments, with `tensor` at this index of `tensors()`."""
        tensors = list(self.tensors())
        tensors[index] = tensor
        kwargs = dict(zip(self.kwargs, tensors[len(self.args) :], strict=True))
        return Arguments(tuple(tensors[: len(self.args)]), kwargs)


def describe_inputs(example_inputs: ExampleInputs) -> InputSpec:
    """Describe a user's example inputs.

    Raises:
        PlanError: The inputs are not a tensor, a sequence of tensors, or a mapping of tensors.
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


def _described(name: str | None, tensor: object) -> TensorSpec:
    assert isinstance(tensor, Tensor)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype, range=_range(tensor))


def _range(tensor: Tensor) -> tuple[int, int] | tuple[float, float] | None:
    """Return the smallest and the largest value; None if they describe no range."""
    if tensor.is_meta or not tensor.numel() or tensor.is_complex() or tensor.dtype == torch.bool:
        return None
    least = tensor.min().item()
    most = tensor.max().item()
    if tensor.is_floating_point():
        # A constant tensor, as from torch.zeros, is a placeholder, not a range.
        is_range = -MAX_INTEGER < least < most < MAX_INTEGER
        return (least, most) if is_range else None
    return (max(int(least), -MAX_INTEGER), min(int(most), MAX_INTEGER))


def random_arguments(
    inputs: InputSpec, *, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu"
) -> Arguments:
    """Return tensors of random values on the CPU, always the same for a seed.

    Values are uniform in the stated range. Floats without a range are normal. Floats have the given
    dtype. On the device "meta", tensors have no values.
    """
    generator = torch.Generator().manual_seed(seed)
    args = []
    kwargs = {}
    for description in inputs:
        tensor_dtype: torch.dtype = getattr(torch, description.dtype)
        if tensor_dtype.is_floating_point:
            tensor_dtype = dtype
        if device == "meta":
            tensor = torch.empty(description.shape, dtype=tensor_dtype, device=device)
        else:
            tensor = _random_values(description, generator).to(tensor_dtype)
        if description.name is None:
            args.append(tensor)
        else:
            kwargs[description.name] = tensor
    return Arguments(tuple(args), kwargs)


def _random_values(tensor: TensorSpec, generator: torch.Generator) -> Tensor:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    shape = tensor.shape
    if dtype.is_floating_point and tensor.range is not None:
        least, most = tensor.range
        shares = torch.rand(shape, generator=generator, device="cpu", dtype=torch.float64)
        return least + shares * (most - least)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    first, last = tensor.range or (0, 1)
    return torch.randint(int(first), int(last) + 1, shape, generator=generator, device="cpu")
