"""The layers of a plan, made for a model and not in it yet, in the groups that share their
positions."""

from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ..errors import PlanError
from ..layers.conv_classes import CONV_CLASSES, Conv, why_not_replaceable
from ..layers.dcls_conv import DCLS_LAYERS, DclsConvNd
from ..planning.plan import ConversionPlan, LayerPlan, TieGroup
from .boxes import Box


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerGroup:
    """New layers that share their positions (or one that is alone), and the convolutions that they
    will replace."""

    plans: tuple[LayerPlan, ...]
    convs: tuple[Conv, ...]
    layers: tuple[DclsConvNd, ...]  # the same `positions` and `sigma` objects in all of them
    tie: TieGroup | None  # where the shared parameters will be registered; None for a layer alone

    @property
    def title(self) -> str:
        return self.plans[0].stage or self.plans[0].name

    def effective_kernels(self) -> list[Tensor]:
        """What the old convolutions convolve, (O, I, *kernel size) each."""
        pairs = zip(self.convs, self.layers, strict=True)
        return [layer.form.effective_weight(conv, conv.weight.detach()) for conv, layer in pairs]

    @property
    def box(self) -> Box:
        first = self.plans[0]
        return Box(
            first.kernel_size,
            first.dilation,
            first.dilated_size,
            first.interpolation,
            first.dense_axes,
        )

    def kernel_errors(self) -> dict[str, float]:
        """|new - old| / |old| for the kernels of each layer, as they are convolved; nothing on the
        meta device."""
        effective, first = self.effective_kernels(), self.plans[0]
        if effective[0].is_meta:
            return {}
        shapes = zip(first.extents, first.dilated_size, first.dilation, strict=True)
        middle = [slice((size - old) // 2, (size + old) // 2, step) for old, size, step in shapes]
        errors = {}
        for plan, old, layer in zip(self.plans, effective, self.layers, strict=True):
            left = layer.kernel().to(torch.promote_types(old.dtype, torch.float32))
            left[:, :, *middle] -= old
            norm = float(old.float().norm())
            errors[plan.name] = float(left.norm()) / norm if norm else 0.0
        return errors


def make_layers(model: nn.Module, plan: ConversionPlan) -> tuple[LayerGroup, ...]:
    """All layers of the plan, without values and not in the model yet. PlanError: as
    `place_layers_`."""
    convs = {layer.name: _find_conv(model, layer) for layer in plan.layers}
    graphs = [
        f"{name}.".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, fx.GraphModule)
    ]
    for tie in plan.tie_groups:
        if any(f"{tie.owner}.".startswith(graph) for graph in graphs):
            problem = "a graph of torch.fx, whose copies would lose the positions that layers share"
            raise PlanError(
                f"{tie.owner or 'the model'} is in {problem}; convert before tracing, or with "
                f"tie='none'"
            )
    members: dict[str, list[LayerPlan]] = {}
    for layer in plan.layers:
        members.setdefault(layer.tie_group or f"\0{layer.name}", []).append(layer)
    groups = []
    for plans in members.values():
        layers = [
            DCLS_LAYERS[len(layer.dilated_size)].like(
                convs[layer.name],
                layer.kernel_count,
                layer.dilated_size,
                layer.interpolation,
                layer.dense_axes,
            )
            for layer in plans
        ]
        for name in plans[0].shared_parameters:
            shared = getattr(layers[0], name)
            shared.requires_grad = any(getattr(layer, name).requires_grad for layer in layers)
            for other in layers[1:]:
                setattr(other, name, shared)
        owned = None if plans[0].tie_group is None else plan.group(plans[0].tie_group)
        old = tuple(convs[layer.name] for layer in plans)
        groups.append(LayerGroup(plans=tuple(plans), convs=old, layers=tuple(layers), tie=owned))
    return tuple(groups)


def _find_conv(model: nn.Module, layer: LayerPlan) -> Conv:
    """The convolution of the plan, if it is found under all its names and can be replaced without
    loss."""
    try:
        conv, *others = [model.get_submodule(name) for name in layer.names]
    except AttributeError as error:
        raise PlanError(f"{layer.name}: the plan is for another model: {error}") from error
    if not isinstance(conv, CONV_CLASSES[len(layer.kernel_size)]) or not layer.name:
        raise PlanError(
            f"{layer.name}: is a {type(conv).__name__}, where the plan has a convolution"
        )
    if any(other is not conv for other in others):
        raise PlanError(
            f"{layer.name}: the plan has it also at {', '.join(layer.names[1:])}; the model has not"
        )
    if reason := why_not_replaceable(conv):
        raise PlanError(f"{layer.name}: {reason}")
    for name in ("in_channels", "out_channels", "groups", "kernel_size", "dilation"):
        if getattr(conv, name) != getattr(layer, name):
            raise PlanError(
                f"{layer.name}: {name} is {getattr(conv, name)}, "
                f"the plan has {getattr(layer, name)}"
            )
    if (conv.bias is not None) != layer.bias:
        raise PlanError(
            f"{layer.name}: has {'a' if conv.bias is not None else 'no'} bias, unlike the plan"
        )
    return conv
