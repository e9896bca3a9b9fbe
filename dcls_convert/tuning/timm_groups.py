"""timm's own parameter groups, of a model whose tied positions are named as if each stood below a layer."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn


class NamedModel:
    """All that timm's grouping functions read of a model, some of its parameters under other names."""

    def __init__(self, model: nn.Module, names: Mapping[str, str]) -> None:
        self._model, self._names = model, names
        self.pretrained_cfg = getattr(model, "pretrained_cfg", None) or {}
        if hasattr(model, "group_matcher"):
            self.group_matcher = model.group_matcher

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            yield self._names.get(name, name), parameter


def timm_param_groups(
    model: nn.Module, names: Mapping[str, str], layer_decay: float | None, **options: Any
) -> list[dict[str, Any]]:
    """What timm's optimizer factory would make of the model, `model.no_weight_decay()` minded.

    Args:
        model: Not wrapped.
        names: Name of a parameter -> the name under which timm should see it. timm tells a parameter's depth by its
            name, and takes what stands on a stage, and not in a block, for a part of the head.
        layer_decay: As in `timm.optim.create_optimizer_v2`; None for groups by weight decay alone.
        options: For timm's `param_groups_weight_decay` or `param_groups_layer_decay`.
    """
    own: Iterable[str] = getattr(model, "no_weight_decay", tuple)()
    options["no_weight_decay_list"] = {*own, *options.get("no_weight_decay_list", ())}
    seen = NamedModel(model, names)
    optim = importlib.import_module("timm.optim")
    if layer_decay is None:
        return list(optim.param_groups_weight_decay(seen, **options))
    return list(optim.param_groups_layer_decay(seen, layer_decay=layer_decay, **options))
