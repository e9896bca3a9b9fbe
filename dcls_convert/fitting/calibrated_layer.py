"""A new layer in the place of its convolution, in a network that is converted layer by layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layers.conv_classes import PLAIN, Conv
from ..layers.dcls_conv import DclsConvNd
from .boxes import Box
from .calibration_settings import CalibrationSettings
from .second_moments import SecondMoments
from .solve_layer import solve_layer


class CalibratedLayer:
    """A new layer in the place of its convolution, in the network that is converted so far."""

    def __init__(
        self,
        name: str,
        conv: Conv,
        layer: DclsConvNd,
        box: Box,
        *,
        settings: CalibrationSettings,
        calls: int,
        moments: SecondMoments | None,
        running_mean: Tensor | None,
    ) -> None:
        """A layer without its solution yet.

        Args:
            name: The layer's name in the model.
            conv: The old convolution.
            layer: The new layer, with positions and first weights.
            box: In which its kernels were fitted.
            settings: The calibration's constants.
            calls: How often a forward pass calls the convolution.
            moments: Joint moments of all images, where a pass calls it several times.
            running_mean: Running mean of the BatchNorm that the convolution alone feeds; None
                without one.
        """
        self.name = name
        self.conv = conv
        self.layer = layer
        self.box = box
        self.old_forward = conv.forward  # `run_in_lockstep` puts another one in its place
        self._settings = settings
        self._calls = calls
        self._moments = moments
        # Each part starts from the fitted weights, not from the last part's solution, so that the
        # result depends on the sums of all images alone.
        self._fitted_weight = layer.weight.detach().clone()
        # What takes the mean shift: the bias, or the running mean of the BatchNorm behind. None:
        # the layer has neither, and its means stay shifted.
        self.shift_target: Tensor | None = layer.bias
        if layer.bias is None:
            self.shift_target = running_mean
        # (out_channels,): added to the outputs, it gives each channel the old mean.
        self.mean_shift = layer.weight.new_zeros(layer.out_channels, dtype=torch.float64)
        self.output_error: float | None = None  # |new - old| / |old| of the outputs, once solved
        self.keeps_fit = False  # whether too few samples left the fit, without a mean shift
        self.reasons: tuple[
            str, ...
        ] = ()  # that may explain a large output error; set whatever its size
        self._kernel: Tensor | None = None  # of the old kernel's size, where it holds all elements

    @property
    def target_change(self) -> Tensor:
        """(out_channels,): the mean shift as a change of `shift_target`."""
        # A BatchNorm subtracts its running mean.
        return -self.mean_shift if self.layer.bias is None else self.mean_shift

    def outputs(self, input: Tensor) -> Tensor:
        """The layer's outputs; with the mean shift, if the layer has a `shift_target`."""
        if self._kernel is None:
            outputs = self.layer.forward(input)
        else:
            outputs = self.conv._conv_forward(input, self._kernel, self.layer.bias)
        if self.shift_target is None:
            return outputs
        by_channel = self.mean_shift.to(outputs)
        for _ in range(self.layer.dims):
            by_channel = by_channel.unsqueeze(-1)
        return outputs + by_channel

    @torch.no_grad()
    def solve_(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, more_follow: bool
    ) -> None:
        """Give the layer the weights that bring its outputs closest to the targets.

        Positions stay. The outputs are those for these images and the ones before them. If
        `more_follow`, sums are kept, and the images that follow are added to them.
        """
        layer = self.layer
        traits = layer.traits
        moments = self._moments_with(inputs, targets)
        self._moments = moments if more_follow else None
        moments.check(self.name)
        solution = solve_layer(
            moments,
            self.box.to_box(layer.positions),
            self.box.lines_of(traits.effective_weight(self.conv, self.conv.weight)),
            traits.effective_weight(layer, self._fitted_weight).flatten(0, -2),
            fixed_weights=self._transforms_weight,
        )
        self.keeps_fit = solution.keeps_fit
        if not self._transforms_weight:
            layer.weight.copy_(solution.weights.reshape(layer.weight.shape))
        if traits is PLAIN and self.box.sides == self.box.kernel_size:
            self._kernel = self._small_kernel()
        old_bias = 0.0 if layer.bias is None else layer.bias.double()
        self.mean_shift = solution.bias - old_bias
        self.output_error = solution.output_error
        self.reasons = self._reasons(moments)

    @property
    def _transforms_weight(self) -> bool:
        """Whether the layer transforms its weight, by weight standardisation for example.

        Solved weights would have to be transformed back; so the weights stay fixed.
        """
        return self.layer.traits.transform_weight is not None

    def _moments_with(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> SecondMoments:
        """The sums of all images so far.

        A convolution that a pass calls once adds these images, with inputs from the new network.
        One that is called several times has the sums of all images already, from the old network.
        """
        moments = self._moments
        if moments is None:
            moments = SecondMoments(self.layer, self.box, joint=True, settings=self._settings)
        if self._calls == 1:
            for input, target in zip(inputs, targets, strict=True):
                moments.add(input, target)
        return moments

    def _reasons(self, moments: SecondMoments) -> tuple[str, ...]:
        """What keeps the outputs from the targets, beyond what the elements can do."""
        layer = self.layer
        reasons = []
        weights = layer.weight[0].numel()  # of an output channel
        samples = moments.sample_count
        few_samples = samples < self._settings.samples_per_weight_to_warn * weights
        if few_samples and not self._transforms_weight:
            reasons.append(f"few sampled places ({samples:,} for {weights:,} weights)")
        if self._calls > 1:
            reasons.append(f"called {self._calls} times in a pass")
        if self._transforms_weight:
            reasons.append("weights fixed by weight standardisation or the like")
        if self.shift_target is None:
            reasons.append("no bias or single BatchNorm takes the mean shift")
        return tuple(reasons)

    def _small_kernel(self) -> Tensor:
        """The box of the constructed kernel, which all elements are in: faster to convolve with."""
        kernel = self.layer.kernel()
        box = self.box
        for axis, first, side in zip(box.axes, box.origin, box.sides, strict=True):
            start = first + self.layer.kernel_size[axis] // 2
            kernel = kernel.narrow(2 + axis, start, side)
        return kernel
