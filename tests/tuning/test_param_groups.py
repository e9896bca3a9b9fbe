"""Parameter groups, weight decay in timm's own optimizers, and clamping."""

import copy
import math
import re
from pathlib import Path

import pytest
import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import dcls_convert
from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConvNd
from dcls_convert.layers.position_parameters import position_parameters
from dcls_convert.networks.wrappers import inside_wrappers

from ..conftest import TINY
from .models import converted, named

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
# Schedulers of the page's table: with one rate for all groups, and with one for each.
LOSING, INSTEAD = zip(
    *re.findall(r"^\| `(\w+\(optimizer.*)` \| `(\w+\(optimizer.*)` \|$", PAGE, re.MULTILINE),
    strict=True,
)
KEEPING = (
    "CosineAnnealingLR(optimizer, 100)",
    "SequentialLR(optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 100)], [10])",
)


@pytest.fixture(params=["tied", "gaussian", "resnet", "no dcls"])
def model(request):
    return converted(request.param)


@pytest.fixture
def tied():
    return converted("tied")


def moving_names(model: nn.Module) -> set[str]:
    """Return the names of the positions and sigmas that layers use."""
    layers = [module for module in model.modules() if isinstance(module, DclsConvNd)]
    used = {id(tensor) for layer in layers for tensor in (layer.positions, layer.sigma)}
    return {name for name, parameter in model.named_parameters() if id(parameter) in used}


def without(groups, names) -> list[dict]:
    remaining = [
        {**group, "params": [name for name in group["params"] if name not in names]}
        for group in groups
    ]
    return [group for group in remaining if group["params"]]


# Parameter groups.


@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.05},
        {"weight_decay": 0.0, "weight_decay_exclude_1d": False},
        {"no_weight_decay_list": ["*.w*"]},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:frozen and trained layers share positions")
def test_groups_equal_those_of_timm_except_for_positions(model, options):
    for parameter in list(model.parameters())[::3]:
        parameter.requires_grad = False
    timms = param_groups_weight_decay(model, **{"weight_decay": 0.05, **options})
    ours = named(model, tuning.param_groups(model, **options))
    moving = moving_names(model)
    rest = without(ours, moving)
    assert rest == without(named(model, timms), moving)
    apart = [group for group in ours if group not in rest]
    trainable = [name for name in moving if model.get_parameter(name).requires_grad]
    assert sorted(name for group in apart for name in group["params"]) == sorted(trainable)
    expected = [(0.0, 5.0)] if trainable else []
    assert [(group["weight_decay"], group["lr_scale"]) for group in apart] == expected


def ratio_of_rates(optimizer) -> float:
    (moving,) = {group["lr"] for group in optimizer.param_groups if group.get("use_fallback")}
    (rest,) = {group["lr"] for group in optimizer.param_groups if not group.get("use_fallback")}
    return moving / rest


# SequentialLR of torch 2.8 warns of its own use.
@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("call", [*KEEPING, *LOSING, *INSTEAD])
def test_the_page_says_under_which_schedulers_positions_learn_5_times_as_fast(tied, call):
    optimizer = torch.optim.AdamW(tuning.param_groups(tied, lr=1e-3))
    names = {
        **vars(lr_scheduler),
        "SWALR": SWALR,
        "optimizer": optimizer,
        "rates": [group["lr"] for group in optimizer.param_groups],
    }
    exec(re.search(r"```python\n(import math\n.*?)```", PAGE, re.DOTALL)[1], names)  # cosine
    scheduler = eval(call, names)
    ratios = []
    for _ in range(30):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        ratios.append(ratio_of_rates(optimizer))
    if call in LOSING:
        assert min(ratios) < 4.9
    else:
        assert ratios == pytest.approx([5] * 30)


@pytest.mark.parametrize("lr", [0.01, None])
def test_positions_learn_5_times_as_fast_under_the_schedulers_of_timm(tied, lr):
    def groups(model):
        return tuning.param_groups(model, lr)

    optimizer = create_optimizer_v2(tied, "lookahead_adamw", lr=0.01, param_group_fn=groups)
    # Rates that are set in timm's scheduler are scaled only through lr_scale.
    floors = {} if lr else {"warmup_lr_init": 1e-4, "lr_min": 1e-5}
    scheduler = CosineLRScheduler(optimizer, 14, warmup_t=3, **floors)
    for index in range(12):
        optimizer.step()
        scheduler.step(index + 1)
        assert ratio_of_rates(optimizer) == pytest.approx(5)


@pytest.mark.parametrize("kind", ["tied", "gaussian", "resnet"])
def test_layer_decay_equals_that_of_timm_for_the_unconverted_model(kind):
    model = converted(kind)
    names = dict(model.named_parameters()).keys()
    before = timm.create_model("test_resnet" if kind == "resnet" else TINY)
    timms = scales(before, param_groups_layer_decay(before, weight_decay=0.1, layer_decay=0.5))
    relative = tuning.param_groups(model, weight_decay=0.1, layer_decay=0.5)
    ours = scales(model, relative)
    assert {name: ours[name] for name in names - moving_names(model)} == timms
    for parameter in position_parameters(model):
        first_layer = next(iter(parameter.layers))
        assert ours[parameter.name] == (5 * timms[f"{first_layer}.weight"][0], 0.0)
    assert len({ours[name] for name in moving_names(model)}) > 1
    absolute = tuning.param_groups(model, lr=0.01, weight_decay=0.1, layer_decay=0.5)
    assert [group["lr"] for group in absolute] == pytest.approx(
        [0.01 * group["lr_scale"] for group in relative]
    )
    assert not any("lr_scale" in group for group in absolute)


def test_sigmas_may_have_a_scale_of_their_own():
    model = converted("gaussian")
    scale_of = scales(model, tuning.param_groups(model, sigma_lr_scale=2))
    for name in moving_names(model):
        assert scale_of[name] == (2 if "sigma" in name else 5, 0.0)


def scales(model, groups) -> dict[str, tuple[float, float]]:
    return {
        name: (group.get("lr_scale", 1), group["weight_decay"])
        for group in named(model, groups)
        for name in group["params"]
    }


def as_ddp(model):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(model)
    finally:
        dist.destroy_process_group()


def compiled_in_part(model):
    model.stages[1] = torch.compile(model.stages[1])
    return model


@pytest.mark.parametrize("wrap", [as_ddp, torch.compile, compiled_in_part, ModelEmaV3])
def test_wrapped_models_are_grouped_and_recorded_like_the_models_inside(tied, wrap):
    record = tuning.PositionTracker(tied).update(0)
    alone = sorted_names(tied, tuning.param_groups(tied))
    wrapped = wrap(tied)
    assert tuning.PositionTracker(wrapped).update(0) == record
    assert sorted_names(inside_wrappers(wrapped), tuning.param_groups(wrapped)) == alone
    assert tuning.no_weight_decay(wrapped) == moving_names(wrapped)


def sorted_names(model, groups) -> list[dict]:
    """Return the groups with the names of parameters without those of `torch.compile`."""
    return [
        {**group, "params": sorted(name.replace("_orig_mod.", "") for name in group["params"])}
        for group in named(model, groups)
    ]


@pytest.mark.parametrize(
    "wrong",
    [{"lr": "1e-3"}, {"position_lr_scale": math.nan}, {"layer_decay": -1}],
)
def test_invalid_rates_are_refused(tied, wrong):
    with pytest.raises(dcls_convert.DclsConvertError, match=f"^{next(iter(wrong))}=.*at least 0"):
        tuning.param_groups(tied, **wrong)


# Weight decay in timm's own optimizers.


@pytest.mark.parametrize("kind", ["tied", "gaussian"])
def test_timm_itself_does_not_decay_positions_of_converted_models_and_their_copies(kind, tmp_path):
    model = converted(kind)
    timm.models.save_for_hf(model, tmp_path / "saved")
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True)
    for a_copy in (copy.deepcopy(model), loaded):
        optimizer = create_optimizer_v2(a_copy, "adamw", lr=0.1, weight_decay=0.1)
        groups = named(a_copy, optimizer.param_groups)
        decayed = {name for group in groups if group["weight_decay"] for name in group["params"]}
        matrices = {name for name, p in a_copy.named_parameters() if p.ndim > 1}
        moving = moving_names(a_copy)
        assert decayed == matrices - moving
        assert a_copy.no_weight_decay() == tuning.no_weight_decay(a_copy) == moving


def test_a_no_weight_decay_of_the_model_is_extended_and_restored_by_folding():
    class WithOwn(nn.Sequential):
        def no_weight_decay(self):
            return ["0.bias"]

    model = WithOwn(nn.Conv2d(8, 8, 3, padding=1, groups=8))
    dcls_convert.convert_(model, dilated_size=5, input_size=(8, 16, 16), init="random")
    assert model.no_weight_decay() == {"0.bias", "0.positions"}
    assert dcls_convert.fold_to_dense_(model) == 1
    assert model.no_weight_decay() == ["0.bias"]


# Clamping.


def test_clamping_moves_positions_inside_and_nothing_else(model):
    with torch.no_grad():
        for parameter in position_parameters(model):
            parameter.tensor.add_(torch.randn_like(parameter.tensor) * 10)
    expected = copy.deepcopy(model)
    tuning.clamp_positions_(model)
    for layer in expected.modules():
        if isinstance(layer, DclsConvNd):
            layer.clamp_positions_()
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


def test_positions_that_frozen_and_trained_layers_share_are_warned_about_once():
    model = converted("tied")
    first, second = (f"stages.1.blocks.{index}.conv_dw" for index in (0, 1))
    shared = f"{first}.positions"
    for frozen, says in {
        second: f"{shared} changes kernels of frozen {second}.",
        first: f"{shared} is frozen under trained {second}.",
    }.items():
        model.requires_grad_(True)
        model.get_submodule(frozen).requires_grad_(False)
        with pytest.warns(UserWarning, match=re.escape(says)) as warned:
            tuning.param_groups(model)
        assert len(warned) == 1
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("positions"))
    tuning.param_groups(model)  # positions alone are trained on purpose: no warning
