"""What tunes where the elements of a model are: its positions and sigmas, found through the layers that use them.

A name alone does not tell: a tied tensor stands on its owner, and a module of the user's may call its own "positions".
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, fx, nn

from .dcls_conv import DclsConvNd
from .ties import SHARED_PARAMETERS

# Where DDP and DataParallel, EMA copies, `torch.compile` and FSDP1 keep the model that they wrap.
WRAPPED_AT = ("module", "_orig_mod", "_fsdp_wrapped_module")
HOOK = "no_weight_decay"  # the method that timm asks for the names of parameters


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SharedParameter:
    """One positions or sigma tensor of a model, of a tie group or of a layer alone."""

    name: str  # in `named_parameters`; below its first layer where the tensor lies outside the model
    kind: str  # "positions" or "sigma"
    tensor: Tensor  # (A, *C, E); the parameter itself
    layers: tuple[DclsConvNd, ...]
    layer_names: tuple[str, ...]

    @property
    def learnt_size(self) -> tuple[int, ...]:
        """Cells of the window along the learnt axes."""
        return tuple(self.layers[0].dilated_kernel_size[axis] for axis in self.layers[0].learnt_axes)

    @property
    def name_below_layer(self) -> str:
        """Where the parameter would stand if the first of its layers had it for itself."""
        return f"{self.layer_names[0]}.{self.kind}".lstrip(".")


def shared_parameters(model: nn.Module) -> tuple[SharedParameter, ...]:
    """Every positions and sigma tensor of the model once, in the order of the layers; none without DCLS layers."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    users: dict[int, list[tuple[str, str, Tensor, DclsConvNd]]] = {}
    for layer_name, layer in model.named_modules():
        if isinstance(layer, DclsConvNd):
            for kind in SHARED_PARAMETERS:
                if (tensor := getattr(layer, kind)) is not None:
                    users.setdefault(id(tensor), []).append((layer_name, kind, tensor, layer))
    found = []
    for key, uses in users.items():
        layer_name, kind, tensor, _ = uses[0]
        found.append(
            SharedParameter(
                name=names.get(key, f"{layer_name}.{kind}".lstrip(".")),
                kind=kind,
                tensor=tensor,
                layers=tuple(layer for *_, layer in uses),
                layer_names=tuple(name for name, *_ in uses),
            )
        )
    return tuple(found)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers that only pass on to it: DDP, `torch.compile`, EMA copies, FSDP1."""
    while len(model._modules) == 1 and not model._parameters:
        ((name, inner),) = model._modules.items()
        if name not in WRAPPED_AT or inner is None:
            break
        model = inner
    return model


def whole(tensor: Tensor) -> Tensor:
    """A parameter that FSDP2 spreads over ranks, gathered; differentiable, and to be called on all of them."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def no_weight_decay(model: nn.Module) -> set[str]:
    """The names of all positions and sigmas in `model.named_parameters()`.

    Weight decay would draw the elements to the centre of the kernel (paper, section 3 "Weight decay"), and sigmas to
    zero. The method `no_weight_decay()` of a converted model, which timm asks, names them too.
    """
    own = {id(shared.tensor) for shared in shared_parameters(model)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}


def spare_from_decay_(model: nn.Module) -> None:
    """Let `model.no_weight_decay()` name positions and sigmas too, so that timm's own optimizers do not decay them."""
    if not isinstance(model, fx.GraphModule):  # whose copies and pickles keep no attributes of this kind
        vars(model)[HOOK] = SpareFromDecay(model, vars(model).get(HOOK))


def drop_spare_from_decay_(model: nn.Module) -> None:
    """Undo `spare_from_decay_`, in all of the model."""
    for module in model.modules():
        hook = vars(module).get(HOOK)
        if isinstance(hook, SpareFromDecay):
            del vars(module)[HOOK]
            if hook.before is not None:
                vars(module)[HOOK] = hook.before


class SpareFromDecay:
    """`no_weight_decay` of one model alone: what it says by itself, and its positions and sigmas."""

    def __init__(self, module: nn.Module | None, before: Any = None) -> None:
        self.module = module
        # What the model had under this name; of an earlier conversion, what it had before that.
        self.before: Any = before.before if isinstance(before, SpareFromDecay) else before

    def __call__(self) -> set[str]:
        if self.module is None:  # copied without its module
            return set()
        of_class = getattr(type(self.module), HOOK, None)
        own = self.before() if self.before is not None else of_class(self.module) if of_class is not None else ()
        return {*own, *no_weight_decay(self.module)}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # A module whose class copies its attributes in a way of its own would be copied without end from here.
        return type(self)(memo.get(id(self.module)), self.before)
