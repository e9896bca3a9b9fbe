"""Count the multiply-accumulates (MACs) that a network computes.

torch's `FlopCounterMode` counts matrix products and convolutions. `FORMULAS` adds operators for
which torch counts nothing: recurrent layers, the fast path of attention, attention on CPUs,
deformable convolutions.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

# Modules whose weights are in no product: they are looked up, or scale single elements.
WITHOUT_PRODUCTS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)


class MacCounter:
    """Counts the MACs that this thread computes inside the block.

    Attributes:
        macs: MACs of all operators. Products are dense: masked or padded elements count, too.
        uncounted: Names of modules that have weights and were called, but without a count: an
            operator without a formula hides their products.

    `uncounted` names a module wrongly if the module only adds its weights or looks them up, such
    as a table of relative positions in a module of its own. `uncounted` misses hidden products
    without weights (an attention kernel of another library), products of a module that also
    computes counted ones, and products with the weights of a module that is not called itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self.macs = 0
        self.uncounted: tuple[str, ...] = ()
        self._names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            has_parameters = bool(module._parameters)
            if has_parameters and _has_weight(module) and ".parametrizations." not in f".{name}.":
                self._names[module] = name
        self._flops_before: dict[nn.Module, int] = {}  # count before a module's latest call
        self._is_counted: dict[str, bool] = {}  # by the name of a called module
        self._blocks = contextlib.ExitStack()

    def __enter__(self) -> Self:
        from torch.utils.flop_counter import FlopCounterMode

        counter: Any = FlopCounterMode(display=False)
        counter.mod_tracker = _WholeModel()
        # Not as custom_mapping, which replaces tensors by their shapes: nested tensors have none.
        counter.flop_registry |= _formulas()
        self._counter = counter
        # The hooks are global, not on modules: an nn.TransformerEncoderLayer with hooks of its own
        # computes in another way.
        hooks = nn.modules.module
        self._blocks.enter_context(hooks.register_module_forward_pre_hook(self._before_call))
        self._blocks.enter_context(hooks.register_module_forward_hook(self._after_call))
        self._blocks.enter_context(counter)
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.close()
        self.macs = self._counter.get_total_flops() // 2  # a multiply-accumulate is two operations
        self.uncounted = tuple(name for name, done in self._is_counted.items() if not done)

    def restart(self) -> None:
        """Set all counts to zero, inside the block."""
        self._counter.flop_counts.clear()
        self._is_counted.clear()

    def _before_call(self, module: nn.Module, args: object) -> None:
        if module in self._names:
            self._flops_before[module] = self._counter.get_total_flops()

    def _after_call(self, module: nn.Module, args: object, output: object) -> None:
        name = self._names.get(module)
        if name is not None:
            has_counted = self._counter.get_total_flops() > self._flops_before[module]
            self._is_counted[name] = has_counted or self._is_counted.get(name, False)


class _WholeModel(contextlib.nullcontext[None]):
    """Replaces torch's module tracker: all operations count for the model as a whole.

    torch's tracker hooks every module of the process, so other threads confuse it.
    """

    parents = ("Global",)


def _has_weight(module: nn.Module) -> bool:
    """True if a module has a parameter that should take part in products.

    Biases and position embeddings are added, as are most parameters whose first axis has length 1.
    """
    if isinstance(module, WITHOUT_PRODUCTS):
        return False
    for name, parameter in module.named_parameters(recurse=False):
        is_added = "bias" in name or "pos" in name or parameter.shape[:1] == (1,)
        has_several_axes = parameter.numel() > max(parameter.shape, default=1)
        if has_several_axes and not is_added:
            return True
    return False


# Formulas take an operator's arguments, and its output as `out_val`. They return two operations
# for each multiply-accumulate, as torch's do.


def _recurrent(input: Tensor, weights: Sequence[Tensor], *_: object, **__: object) -> int:
    """Each weight matrix of each layer at each step; packed sequences are one axis of steps."""
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    return 2 * math.prod(input.shape[:-1]) * matrices


def _lstm_layer(input: Tensor, *args: Any, **_: object) -> int:
    """One direction of one layer, by oneDNN: two weights, and two biases."""
    return _recurrent(input, args[:2])


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    """Query with key, and scores with value; a key can serve several heads of queries."""
    features = query.shape[-1] + value.shape[-1]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * features


def _multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, *_: object, **__: object
) -> int:
    """Attention, and the projections of query, key, value and output."""
    batch, queries, _size = _padded_shape(query)
    keys = _padded_shape(key)[1]
    projections = 2 * (queries + keys) * embed_dim**2
    products = 2 * queries * keys * embed_dim
    return 2 * batch * (projections + products)


def _encoder_layer(source: Tensor, embed_dim: int, *args: Any, **_: object) -> int:
    """Attention of a sequence to itself, then two linear layers for each of its elements."""
    batch, length, _size = _padded_shape(source)
    first_weight: Tensor = args[12]
    second_weight: Tensor = args[14]
    feed_forward = first_weight.numel() + second_weight.numel()
    attention = _multi_head_attention(source, source, source, embed_dim)
    return attention + 2 * batch * length * feed_forward


def _padded_shape(sequences: Tensor) -> Sequence[int]:
    """Shape (sequences, elements, features); nested sequences are padded to the longest."""
    if not sequences.is_nested:
        return sequences.shape
    sizes: list[list[int]] = sequences._nested_tensor_size().tolist()
    return len(sizes), max(length for length, _ in sizes), sizes[0][1]


def _deform_conv(input: Tensor, weight: Tensor, *_: object, out_val: Tensor, **__: object) -> int:
    """The MACs of an ordinary convolution; interpolating the input is not counted."""
    return 2 * out_val.numel() * weight[0].numel()


# By name of the operator. Not every version of torch has all of them.
FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_cudnn_rnn": _recurrent,
    "aten::miopen_rnn": _recurrent,
    "aten::mkldnn_rnn_layer": _lstm_layer,
    "aten::_native_multi_head_attention": _multi_head_attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    # Also the operators of CUDA: the formulas of older versions of torch refuse grouped heads.
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_attention_math_for_mps": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "torchvision::deform_conv2d": _deform_conv,
}


def _formulas() -> dict[object, Callable[..., int]]:
    """Return the formulas by operator, for the operators that this version of torch has."""
    formulas: dict[object, Callable[..., int]] = {}
    for name, formula in FORMULAS.items():
        library, operator = name.split("::")
        overloads = getattr(getattr(torch.ops, library), operator, None)
        if overloads is not None:
            formulas[overloads] = formula
    return formulas
