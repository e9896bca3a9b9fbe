"""A new layer that stands in for its convolution, while a network is converted layer by layer."""

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
    """A new layer during a calibration: its solution, and its outputs in place of the old ones."""

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
        """Prepare the layer; `solve_` finds its weights.

        Args:
            name: The layer's name in the model.
            conv: The old convolution.
            layer: The new layer, with positions and fitted weights.
            box: Box within which its kernels were fitted.
            settings: The calibration's constants.
            calls: How often a forward pass calls the convolution.
            moments: Joint moments of all images, if a pass calls the convolution several times.
            running_mean: Running mean of the BatchNorm that the convolution alone feeds; None if
                there is no such BatchNorm.
        """
        self.name = name
        self.conv = conv
        self.layer = layer
        self.box = box
        self.old_forward = conv.forward  # kept, since a calibration replaces it
        self._settings = settings
        self._calls = calls
        self._moments = moments
        # Each part starts from the fitted weights, not from the last part's solution, so that the
        # result depends on the sums of all images alone.
        self._fitted_weight = layer.weight.detach().clone()
        # The tensor to which the mean shift is applied: the bias, else the running mean of the
        # BatchNorm after the layer. None if there is neither; then the means stay shifted.
        self.shifted_tensor: Tensor | None = layer.bias
        if layer.bias is None:
            self.shifted_tensor = running_mean
        # Added to the outputs, it gives each channel its old mean: (out_channels,).
        self.mean_shift = layer.weight.new_zeros(layer.out_channels, dtype=torch.float64)
        self.output_error: float | None = None  # |new - old| / |old| of the outputs, once solved
        # True if there are too few samples to solve: the fit stays, and there is no mean shift.
        self.keeps_fit = False
        # Reasons that may explain a large output error; set even if the error is small.
        self.reasons: tuple[str, ...] = ()
        # The kernel, cropped to the old kernel's size, if that holds all elements.
        self._cropped_kernel: Tensor | None = None

    @property
    def change_of_shifted_tensor(self) -> Tensor:
        """The change of `shifted_tensor` that applies the mean shift: (out_channels,)."""
        # A BatchNorm subtracts its running mean.
        return -self.mean_shift if self.layer.bias is None else self.mean_shift

    def outputs(self, input: Tensor) -> Tensor:
        """Return the layer's outputs, with the mean shift if there is a `shifted_tensor`."""
        if self._cropped_kernel is None:
            outputs = self.layer.forward(input)
        else:
            outputs = self.conv._conv_forward(input, self._cropped_kernel, self.layer.bias)
        if self.shifted_tensor is None:
            return outputs
        mean_shift = self.mean_shift.to(outputs)
        for _ in range(self.layer.dims):
            mean_shift = mean_shift.unsqueeze(-1)
        return outputs + mean_shift

    @torch.no_grad()
    def solve_(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], *, more_follow: bool
    ) -> None:
        """Give the layer the weights that bring its outputs closest to the targets.

        Positions do not change. All images so far count, those of earlier calls included. If
        `more_follow`, their sums are kept for the next call.
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
            self._cropped_kernel = self._crop_kernel()
        old_bias = 0.0 if layer.bias is None else layer.bias.double()
        self.mean_shift = solution.bias - old_bias
        self.output_error = solution.output_error
        self.reasons = self._reasons(moments)

    @property
    def _transforms_weight(self) -> bool:
        """True if the layer transforms its weight, by weight standardisation for example.

        Solved weights would have to be transformed back, so the weights stay fixed instead.
        """
        return self.layer.traits.transform_weight is not None

    def _moments_with(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> SecondMoments:
        """Return the moments of all images so far, these included.

        If a pass calls the convolution once, these images are added, with inputs from the new
        network. If it is called several times, its moments were measured in the old network, on all
        images at once.
        """
        moments = self._moments
        if moments is None:
            moments = SecondMoments(self.layer, self.box, joint=True, settings=self._settings)
        if self._calls == 1:
            for input, target in zip(inputs, targets, strict=True):
                moments.add(input, target)
        return moments

    def _reasons(self, moments: SecondMoments) -> tuple[str, ...]:
        """Return what keeps the outputs from the targets, besides the limits of the elements."""
        layer = self.layer
        reasons = []
        weights = layer.weight[0].numel()  # per output channel
        samples = moments.sample_count
        few_samples = samples < self._settings.samples_per_weight_to_warn * weights
        if few_samples and not self._transforms_weight:
            reasons.append(f"few sampled places ({samples:,} for {weights:,} weights)")
        if self._calls > 1:
            reasons.append(f"called {self._calls} times in a pass")
        if self._transforms_weight:
            reasons.append("weights fixed by weight standardisation or the like")
        if self.shifted_tensor is None:
            reasons.append("no bias or single BatchNorm takes the mean shift")
        return tuple(reasons)

    def _crop_kernel(self) -> Tensor:
        """Crop the constructed kernel to the box, which holds all elements, to convolve faster."""
        kernel = self.layer.kernel()
        box = self.box
        for axis, first, side in zip(box.axes, box.origin, box.sides, strict=True):
            start = first + self.layer.kernel_size[axis] // 2
            kernel = kernel.narrow(2 + axis, start, side)
        return kernel
