"""Refuse state dicts of another conversion.

torch alone would load them, because names and shapes are the same for every window.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..geometry import along_learnt_axes, position_limits, size_text
from .interpolation import POSITION_PARAMETERS, find_interpolation
from .ties import Tieable, at_least_float32, is_sharded

# Cells. The last step of an optimizer may leave an element a little outside of the window, or a
# sigma below its minimum; their next use in training clamps them.
MAX_OUTSIDE = 0.5  # the next larger window has elements up to one cell outside
MAX_BELOW = 0.25  # a Gaussian's sigmas start half a cell below a triangle's minimum
CURE = "load it into a network that was converted in the same way"


class CheckedLayer(Tieable):
    """A layer that refuses state dicts of other conversions, with torch's own error."""

    dilated_kernel_size: tuple[int, ...]
    dense_axes: tuple[int, ...]
    interpolation: str

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load the layer, unless the state dict is of another conversion.

        Positions stay in float32 at least, with `assign=True` too.
        """
        error_msgs: list[str] = others[-1]
        problem = self.describe_other_state(state_dict, prefix)
        if problem is not None and not any(CURE in message for message in error_msgs):
            error_msgs.append(problem)  # one line for all layers
        for name in POSITION_PARAMETERS:
            stored = state_dict.get(prefix + name)
            if isinstance(stored, Tensor):
                state_dict[prefix + name] = stored.to(at_least_float32(stored.dtype))
        if problem is None:
            super()._load_from_state_dict(state_dict, prefix, *others)

    def describe_other_state(self, state: Mapping[str, Any], prefix: str) -> str | None:
        """Return why this layer must not load the state dict, with `CURE`; None if it may."""
        name = prefix.removesuffix(".") or type(self).__name__
        positions = state.get(f"{prefix}positions")
        if self.is_tied:
            if positions is None:
                return None
            return f"{name} shares positions, and has its own in the state dict; {CURE}"
        if positions is None and "positions" in self._parameters and f"{prefix}weight" in state:
            return (
                f"{name} has weights but no positions in the state dict (load the weights of an "
                f"unconverted network before its conversion); {CURE}"
            )
        problem = None
        if isinstance(positions, Tensor):
            problem = self._describe_positions_outside(positions, f"{prefix}positions")
        sigma = state.get(f"{prefix}sigma")
        if problem is None and isinstance(sigma, Tensor):
            problem = self._describe_sigma_below(sigma, f"{prefix}sigma")
        return problem

    def _describe_positions_outside(self, positions: Tensor, name: str) -> str | None:
        """Say how far positions are outside of the window; None if at most `MAX_OUTSIDE`.

        Positions that FSDP2 has sharded, perhaps along the axes of the window, are not checked.
        """
        if positions.is_meta or is_sharded(positions) or positions.shape != self.positions.shape:
            return None
        excess = 0.0
        clamps = []
        lengths = along_learnt_axes(self.dilated_kernel_size, self.dense_axes)
        for axis, length in enumerate(lengths):
            low, high = position_limits(length)
            smallest, largest = map(float, positions[axis].detach().float().aminmax())
            excess = max(excess, low - smallest, largest - high)
            clamps.append(f"state[{name!r}][{axis}].clamp_({low}, {high})")
        if excess <= MAX_OUTSIDE:
            return None
        return (
            f"{name} has elements up to {excess:.3g} cells outside of the window "
            f"{size_text(self.dilated_kernel_size)}. If other code has moved them (an average, a "
            f"task vector), clamp all positions first: {'; '.join(clamps)}. If their network has a "
            f"larger window, {CURE}"
        )

    def _describe_sigma_below(self, sigma: Tensor, name: str) -> str | None:
        """Say how far sigmas are below their minimum; None if at most `MAX_BELOW`."""
        minimum = find_interpolation(self.interpolation).min_sigma
        if minimum is None or sigma.is_meta or is_sharded(sigma):
            return None
        smallest = float(sigma.detach().min())
        if math.isnan(smallest) or smallest >= minimum - MAX_BELOW:  # NaN is not for this check
            return None
        return (
            f"{name} has values down to {smallest:.3g} cells; {self.interpolation} interpolation "
            f"needs {minimum:g} or more. If other code has changed them, clamp them first: "
            f"state[{name!r}].clamp_(min={minimum:g}). If their network has another interpolation, "
            f"{CURE}"
        )
