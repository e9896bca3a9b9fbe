"""Elements of the authors' package are loaded without loss: single layers, whole networks, and
files that do not fit.

Axes: O output channels, I input channels per group, E kernel elements, A spatial axes.
"""

import copy
import functools
import re
from dataclasses import replace

import DCLS.construct.modules as authors
import pytest
import timm
import torch
from torch import nn

import dcls_convert
from dcls_convert.layers.conv_classes import CONV_CLASSES
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.layers.interpolation import INTERPOLATIONS

from ..command_line import run
from ..conftest import TINY
from ..model_state import state_of
from ..rules import LARGER_THAN_1, rules_of

pytestmark = pytest.mark.usefixtures("empty_folder")
FLOAT64_ATOL = 1e-10  # without their normaliser, errors would be 1e-7
FLOAT32_TOLERANCE = 1e-5
COUNT = 5
SMALL_INPUT = ("--input-size", "3x32x32")  # for speed
# The network's first layers: the only one of its stage, and the two of the next stage.
FIRST = "stages.0.blocks.0.conv_dw"
SECOND = "stages.1.blocks.0.conv_dw"
THIRD = "stages.1.blocks.1.conv_dw"
INTERPOLATION_OF = {"v0": "bilinear", "v1": "bilinear", "max": "triangle", "gauss": "gaussian"}


def randomise_positions_(layer, generator):
    """Draw positions of their layer from its whole window, borders included, and sigmas of either
    sign.
    """
    with torch.no_grad():
        for positions, side in zip(layer.P, layer.dilated_kernel_size, strict=True):
            positions.uniform_(-(side // 2), (side - 1) // 2, generator=generator)
            positions.flatten()[:2] = torch.tensor([-(side // 2), (side - 1) // 2])
        if layer.SIG is not None:
            layer.SIG.uniform_(-1.5, 1.5, generator=generator)


# A network with their layers.


@functools.cache
def authors_convnext(version="v0"):
    """Make a ConvNeXt with their layers, whose weights differ from the initialisation.

    All layers of a stage share their positions, as in the authors' networks.
    """
    model = convnext()
    generator = torch.Generator().manual_seed(1)
    options = {"kernel_count": COUNT, "dilated_kernel_size": 17, "padding": 8, "version": version}
    first_of_width = {}
    for name, old in list(model.named_modules()):
        if name.endswith("conv_dw"):
            layer = authors.Dcls2d(old.in_channels, old.out_channels, groups=old.groups, **options)
            model.set_submodule(name, layer)
            if old.in_channels not in first_of_width:  # each stage has another width
                randomise_positions_(layer, generator)
            first = first_of_width.setdefault(old.in_channels, layer)
            layer.P = first.P
            layer.SIG = first.SIG
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if not name.endswith(("P", "SIG")):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def convnext():
    torch.manual_seed(0)
    return timm.create_model(TINY)


def convert_from_theirs_(model, state, **options):
    model.pretrained_cfg = None  # no input size: a trace would take most of the time
    return dcls_convert.convert_from_authors_(model, state, **{"dilated_size": 17, **options})


def original_state_dict(model):
    """Return the state dict with the names of the original ConvNeXt code."""

    names = {
        r"^stem\.": "downsample_layers.0.",
        r"^head\.norm\.": "norm.",
        r"^head\.fc\.": "head.",
        r"stages\.(\d)\.downsample\.": r"downsample_layers.\1.",
        r"stages\.(\d)\.blocks\.": r"stages.\1.",
        "conv_dw": "dwconv",
        r"mlp\.fc": "pwconv",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        for pattern, original in names.items():
            name = re.sub(pattern, original, name)
        state[name] = tensor
    return state


def outputs(model):
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.eval()(x)


def assert_outputs_close(ours, expected):
    """Check outputs, and that they vary: the last layer's bias alone would be close."""
    assert expected.std(0).max() > expected.abs().max() / 100
    torch.testing.assert_close(
        ours, expected, rtol=0, atol=FLOAT32_TOLERANCE * expected.abs().max().item()
    )


# Layers.

# The axes to which P[0], P[1], ... belong, by number of dimensions and whether the version is v0.
AXES = {(2, True): (0, 1), (3, True): (0, 2, 1), (2, False): (1, 0), (3, False): (2, 1, 0)}
LAYERS = [
    *(
        (dims, version, (side,) * dims)
        for dims in (1, 2, 3)
        for side in (7, 6)
        for version in INTERPOLATION_OF
    ),
    (2, "v0", (5, 8)),
    (3, "v0", (3, 6, 7)),
    (2, "v1", (9, 4)),
    (2, "max", (5, 9)),
    (2, "gauss", (9, 4)),
    (3, "gauss", (7, 4, 3)),
]


def authors_layer(dims, version, size, groups):
    generator = torch.Generator().manual_seed(3)
    padding = tuple(side // 2 for side in size)
    layer = getattr(authors, f"Dcls{dims}d")(
        6, 6, 4, dilated_kernel_size=size, padding=padding, stride=2, groups=groups, version=version
    )
    randomise_positions_(layer, generator)
    # With unequal sides, their positions count from half the size of another axis. Keep them inside
    # the window.
    if len(set(size)) > 1:
        with torch.no_grad():
            for index, axis in enumerate(AXES[dims, version == "v0"]):
                layer.P[index].uniform_(0, size[axis] - 1, generator=generator).sub_(
                    size[index] // 2
                )
    return layer


@pytest.mark.parametrize("groups", [1, 6])
@pytest.mark.parametrize(("dims", "version", "size"), LAYERS)
def test_layers_give_the_outputs_of_the_authors_layers(dims, version, size, groups):
    theirs = authors_layer(dims, version, size, groups).double()
    old_size = tuple(2 + side % 2 for side in size)  # of the window's parity
    ours = nn.Sequential(
        CONV_CLASSES[dims](6, 6, old_size, padding=1, stride=2, groups=groups, dtype=torch.float64)
    )
    dcls_convert.convert_from_authors_(
        ours,
        {f"0.{name}": tensor for name, tensor in theirs.state_dict().items()},
        dilated_size=size,
        rules=rules_of(LARGER_THAN_1 | {"padding": "any"}),
        interpolation=INTERPOLATION_OF[version],
        version="v1" if version == "v1" else None,
    )
    x = torch.randn(
        2, 6, *[11, 12, 13][:dims], dtype=torch.float64, generator=torch.Generator().manual_seed(4)
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=FLOAT64_ATOL)
        # Training mode clamps positions, but all are inside the window.
        torch.testing.assert_close(ours.train()(x), theirs(x), rtol=0, atol=FLOAT64_ATOL)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_values_of_v0_stay_exactly_the_same_and_positions_may_have_any_dtype(dtype):
    model = convnext()
    state = authors_convnext().state_dict()
    state |= {name: tensor.to(dtype) for name, tensor in state.items() if name.endswith(".P")}
    convert_from_theirs_(model, state)
    for name, tensor in state.items():
        if name.endswith(".P"):
            positions = model.get_submodule(name[:-2]).positions
            assert torch.equal(positions, tensor.to(positions.dtype))
        else:
            assert torch.equal(model.state_dict()[name], tensor)


# Networks, from the file to timm's factory.


def test_a_network_gives_the_authors_outputs_through_the_command_line():
    theirs = authors_convnext()
    torch.save({"model": original_state_dict(theirs), "epoch": 3}, "theirs.pth")
    out, err = run(
        TINY, *SMALL_INPUT, "--checkpoint", "theirs.pth", "--dilated-size", 17, "--output", "out"
    )
    assert "Wrote out, from the authors' elements and positions" in out
    assert "note: " in err
    ours = dcls_convert.load_converted("out")
    for model in (ours, timm.create_model("local-dir:out", pretrained=True)):
        assert_outputs_close(outputs(model), outputs(theirs))
    layers = [module for module in ours.modules() if isinstance(module, DclsConvNd)]
    assert {layer.kernel_count for layer in layers} == {COUNT}
    first_of_stage = [0, 1, 3, 7]  # 1, 2, 4 and 2 layers in a stage
    assert [i for i, layer in enumerate(layers) if not layer.is_tied] == first_of_stage


# Options.


def test_untied_layers_may_have_positions_of_their_own_and_larger_windows():
    theirs = copy.deepcopy(authors_convnext())
    layer = theirs.get_submodule(SECOND)
    layer.P = nn.Parameter(layer.P.detach() / 2)
    torch.save({"model": theirs.state_dict()}, "theirs.pth")
    model = convnext()
    convert_from_theirs_(model, "theirs.pth", dilated_size=21, tie="none")
    assert_outputs_close(outputs(model), outputs(theirs))
    assert not any(layer.is_tied for layer in model.modules() if isinstance(layer, DclsConvNd))


def test_layers_may_have_different_counts_and_then_have_positions_of_their_own():
    model = convnext()
    state = authors_convnext().state_dict()
    for name in (f"{SECOND}.weight", f"{SECOND}.P"):
        state[name] = state[name][..., :3]
    report = convert_from_theirs_(model, state)
    assert [row.kernel_count for row in report.layers] == [5, 3, *[5] * 7]
    assert [row.tie_group for row in report.layers[1:3]] == [None, None]
    assert torch.equal(model.get_submodule(SECOND).weight, state[f"{SECOND}.weight"])


def test_a_config_of_timm_does_not_say_that_loaded_weights_are_timms():
    state = authors_convnext().state_dict()
    model = convnext()
    model.pretrained_cfg |= {"license": "apache-2.0", "tag": "in1k"}
    dcls_convert.convert_from_authors_(model, state, dilated_size=17, input_size=(3, 32, 32))
    assert not {"license", "tag"} & model.pretrained_cfg.keys()


# State dicts and options that do not fit.


def without(*names):
    return lambda state: {name: tensor for name, tensor in state.items() if name not in names}


def changed(name, change):
    return lambda state: state | {name: change(state[name])}


SEVEN_ELEMENTS = rules_of({"match": {"kind": "depthwise"}, "kernel_count": 7})
GAUSSIAN = {"interpolation": "gaussian"}
# Version, change of the state dict, further options, and words of the message.
REFUSED = {
    "no P": ("v0", without(f"{FIRST}.P"), {}, f"has no elements for {FIRST}"),
    "no layers of theirs": ("v0", lambda _: convnext().state_dict(), {}, "has no layers of the"),
    "different positions in a stage": (
        "v0",
        changed(f"{THIRD}.P", lambda positions: positions / 2),
        {},
        "differ, so the layers of stages.1 cannot share them; use tie 'none'",
    ),
    "no gamma": ("v0", without("stages.0.blocks.0.gamma"), {}, "missing: stages.0.blocks.0.gamma"),
    "outside of a rectangular window": (
        "v0",
        changed(f"{FIRST}.P", lambda positions: torch.full_like(positions, 7.5)),
        {"dilated_size": (21, 11)},
        "outside of its window 21x11; use the window of its training, which has at least 17 cells",
    ),
    "an interpolation with sigma": ("v0", dict, GAUSSIAN, "has no SIG"),
    "another count in a rule": (
        "v0",
        dict,
        {"rules": SEVEN_ELEMENTS},
        f"{FIRST} has 5 elements in a kernel, but rule",
    ),
    "no interpolation stated": ("gauss", dict, {}, "which the file does not say; state the"),
    "a version without sigma": ("gauss", dict, {**GAUSSIAN, "version": "v0"}, "version v0 is for"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_state_dict_that_does_not_fit_is_one_line_and_leaves_the_model_unchanged(kind):
    version, change, options, words = REFUSED[kind]
    model = convnext()
    before = state_of(model)
    with pytest.raises(dcls_convert.DclsConvertError, match=r"^the state dict: [^\n]*$") as caught:
        convert_from_theirs_(model, change(authors_convnext(version).state_dict()), **options)
    assert words in str(caught.value)
    assert state_of(model) == before


def test_an_interpolation_that_the_authors_do_not_have_is_refused(monkeypatch):
    other = replace(INTERPOLATIONS["bilinear"], name="gaussian", is_of_authors=False)
    monkeypatch.setitem(INTERPOLATIONS, "gaussian", other)
    with pytest.raises(dcls_convert.DclsConvertError, match="is bilinear, not gaussian"):
        convert_from_theirs_(convnext(), authors_convnext().state_dict(), **GAUSSIAN)
