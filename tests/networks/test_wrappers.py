"""What is wrapped, or not made of convolutions of torch.nn, stays, with what to do first."""

import pytest
import torch
from torch import nn

from dcls_convert import convert_
from dcls_convert.errors import PlanError

from ..planning.nets import depthwise

IMAGE = (4, 9, 14)


def network(*modules):
    return nn.Sequential(depthwise(), *modules)


def compiled(model):
    return torch.compile(model, backend="eager")


def scripted(model):
    return torch.jit.script(model)


def exported(model):
    return torch.export.export(model, (torch.randn(1, *IMAGE),)).module()


WRAPPED = {
    "compiled": (compiled, "the model is compiled; convert it before torch.compile"),
    "DataParallel": (nn.DataParallel, "wrapped in DataParallel; convert its `module`"),
    "averaged": (torch.optim.swa_utils.AveragedModel, "wrapped in AveragedModel; convert its"),
    "scripted": (scripted, "is TorchScript; convert before torch.jit"),
    "exported": (exported, "is a graph of operators; convert before torch.export"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_is_refused_with_what_to_do_first(kind):
    wrap, message = WRAPPED[kind]
    with pytest.raises(PlanError, match=message):
        convert_(wrap(network()), input_size=IMAGE)


class Adapter(nn.Module):
    """What LoRA makes of a convolution: it adds the outputs of two smaller ones."""

    def __init__(self):
        super().__init__()
        self.base_layer = depthwise()
        self.lora_A = nn.ModuleDict({"default": nn.Conv2d(4, 2, 3, padding=1, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Conv2d(2, 4, 1, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def compiled_itself():
    conv = depthwise()
    conv.compile(backend="eager")
    return conv


def hooked():
    conv = depthwise()
    conv.weight.register_hook(lambda gradient: None)
    return conv


class Marked(torch.Tensor):
    """As the tensors of torchao, or DTensors."""


def subclassed():
    conv = depthwise()
    conv.weight = nn.Parameter(conv.weight.detach().as_subclass(Marked))
    return conv


PARTS = {
    "compiled stage": (lambda: compiled(nn.Sequential(depthwise())), "torch.compile wraps"),
    "compiled itself": (compiled_itself, "convert first, then compile"),
    "scripted stage": (lambda: scripted(nn.Sequential(depthwise())), "is TorchScript"),
    "exported stage": (lambda: exported(depthwise()), "is a graph of operators"),
    "adapter": (Adapter, "merge the adapter first"),
    "hook": (hooked, "its weight has hooks"),
    "subclass": (subclassed, "its weight is a Marked, not a plain tensor"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_cannot_be_replaced_stays_with_what_to_do_first(kind):
    build, reason = PARTS[kind]
    model = network(build())
    report = convert_(model, dilated_size=7, init="random")
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.skipped
    assert all(reason in skip.reason for skip in report.skipped)
