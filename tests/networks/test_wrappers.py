"""What is wrapped, or not made of convolutions of torch.nn, stays, with what to do first."""

import pytest
import timm
import torch
from torch import nn

from dcls_convert import convert_, find_convs, plan_conversion
from dcls_convert.errors import PlanError

from ..planning.nets import depthwise

IMAGE = (4, 9, 14)


def network(*modules):
    return nn.Sequential(depthwise(), *modules)


def scripted(model):
    return torch.jit.script(model)


def traced(model):
    return torch.jit.trace(model, torch.randn(1, *IMAGE))


def exported(model):
    return torch.export.export(model, (torch.randn(1, *IMAGE),)).module()


WRAPPED = {
    "compiled": (torch.compile, "the model is compiled; convert it before torch.compile"),
    "DataParallel": (nn.DataParallel, "wrapped in DataParallel; convert its `module`"),
    "averaged": (torch.optim.swa_utils.AveragedModel, "wrapped in AveragedModel; convert its"),
    "scripted": (scripted, "is TorchScript; convert before torch.jit"),
    "traced": (traced, "is TorchScript; convert before torch.jit"),
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
    conv.compile()
    return conv


def hooked(register):
    conv = depthwise()
    getattr(conv.weight, register)(lambda gradient: None)
    return conv


def quantised():
    options = {"qconfig": torch.ao.quantization.get_default_qat_qconfig("x86")}
    return torch.ao.nn.qat.Conv2d(4, 4, 3, padding=1, groups=4, **options)


class Marked(torch.Tensor):
    """As the tensors of torchao, or DTensors."""


def subclassed():
    conv = depthwise()
    conv.weight = nn.Parameter(conv.weight.detach().as_subclass(Marked))
    return conv


PARTS = {
    "compiled stage": (lambda: torch.compile(nn.Sequential(depthwise())), "torch.compile wraps"),
    "compiled itself": (compiled_itself, "convert first, then compile"),
    "scripted stage": (lambda: scripted(nn.Sequential(depthwise())), "is TorchScript"),
    "exported stage": (lambda: exported(depthwise()), "is a graph of operators"),
    "adapter": (Adapter, "merge the adapter first"),
    "hook": (lambda: hooked("register_hook"), "its weight has hooks"),
    "hook after": (
        lambda: hooked("register_post_accumulate_grad_hook"),
        "its weight has hooks",
    ),
    "complex": (lambda: depthwise(dtype=torch.complex64), "its weight is of torch.complex64"),
    "float8": (lambda: depthwise().to(torch.float8_e4m3fn), "its weight is of torch.float8"),
    "quantised": (quantised, "convert before the quantisation"),
    "subclass": (subclassed, "its weight is a Marked, not a plain tensor"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning")
@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_cannot_be_replaced_stays_with_what_to_do_first(kind):
    build, reason = PARTS[kind]
    model = network(build())
    report = convert_(model, dilated_size=7, init="random")
    assert [layer.name for layer in report.layers] == ["0"]
    assert report.skipped
    assert all(reason in skip.reason for skip in report.skipped)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_part_in_another_form_does_not_hide_the_stem():
    """Without an input size, nothing is traced, and the first convolution is the stem."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), scripted(nn.Sequential(nn.Conv2d(8, 8, 3))))
    convs = find_convs(model)
    assert [site.stem for site in convs.sites] == [True]
    assert len(convs.skipped) == 1


@pytest.mark.parametrize("kind", ["compiled stage", "compiled itself"])
def test_compiled_parts_are_traced(kind):
    assert find_convs(network(PARTS[kind][0]()), IMAGE).macs == 2 * 9 * 14 * 4 * 9


def test_a_compiled_block_is_converted_inside():
    block = nn.Sequential(depthwise())
    block.compile(backend="eager")
    model = network(block)
    report = convert_(model, init="exact", kernel_count="exact", dilated_size=7, input_size=IMAGE)
    assert [layer.name for layer in report.layers] == ["0", "1.0"]
    with torch.no_grad():
        model(torch.randn(1, *IMAGE))


def test_names_may_have_brackets():
    model = network()
    model.extend([nn.ModuleDict({"l[0]": depthwise()})])
    rules = {"format": 1, "rules": [{"match": {"path": "1.l[0]"}}]}
    report = convert_(model, rules=rules, dilated_size=7, init="random")
    assert [layer.name for layer in report.layers] == ["1.l[0]"]
    plan = plan_conversion(find_convs(network(nn.ModuleDict({"l[0]": depthwise()}))))
    assert [layer.name for layer in plan.without("1.l[0]").layers] == ["0"]


def test_a_module_of_the_name_that_adapters_use_is_no_adapter():
    model = timm.create_model("dla34")  # has a `base_layer`
    assert find_convs(model).sites
