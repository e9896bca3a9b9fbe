"""Weights from a file become the model's own: the model is that of the ordinary path, and no second copy is made."""

import gc

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcls_convert import load_converted, save_converted
from dcls_convert.checkpoints.folder import WEIGHTS
from dcls_convert.checkpoints.save import write_files
from dcls_convert.networks import weights
from dcls_convert.networks.source import ModelSource, build_model
from dcls_convert.networks.weights import assign_weights_, build_with_state, load_weights_, read_weights

from .folders import convert, run

FAMILIES = {
    "timm:test_convnext": {},
    "timm:test_efficientnet": {},
    "timm:test_vit": {},
    "timm:resnetblur18": {},  # blur kernels, not in the file
    "timm:swin_tiny_patch4_window7_224": {"depths": (1, 1, 1, 1), "embed_dim": 24},  # relative positions
    "timm:halonet26t": {},
    "torchvision:mnasnet0_5": {},  # asks for the version of its format
    "torchvision:shufflenet_v2_x0_5": {},
    "torchvision:ssdlite320_mobilenet_v3_large": {},  # anchors in a plain attribute
}
# Not to be had without drawing or calculating more than the file has; on the CPU, as ever.
BUILT = {"timm:resnetblur18", "timm:swin_tiny_patch4_window7_224"}


def tensors_of(model):
    """All of them by place, also those in plain attributes, which no state dict has."""
    return {
        f"{name}.{key}.{index}": leaf
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        for index, leaf in enumerate(tree_leaves(value))
        if isinstance(leaf, torch.Tensor)
    }


def filled(source, file):
    """A meta model with the weights of a file; None where it has to be built on the CPU."""
    model = build_model(source, device="meta")
    return model if assign_weights_(model, read_weights(file), "file") else None


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_filled_from_a_file_is_the_ordinary_one(tmp_path, name):
    source = ModelSource(name=name, args=FAMILIES[name])
    save_file(build_model(source, seed=1).state_dict(), tmp_path / "w.safetensors")
    found = filled(source, tmp_path / "w.safetensors")
    assert (found is None) == (name in BUILT)
    if found is not None:
        wanted = build_model(source, seed=0)
        load_weights_(wanted, read_weights(tmp_path / "w.safetensors"), "file")
        check_equal_tensors(found, wanted)
        assert [m.training for m in found.modules()] == [m.training for m in wanted.modules()]


def check_equal_tensors(found, wanted):
    ours, theirs = tensors_of(found), tensors_of(wanted)
    assert ours.keys() == theirs.keys()
    for place, tensor in theirs.items():
        mine = ours[place]
        assert (mine.dtype, mine.device, mine.stride()) == (tensor.dtype, tensor.device, tensor.stride()), place
        assert (mine.requires_grad, type(mine)) == (tensor.requires_grad, type(tensor)), place
        assert torch.equal(mine, tensor), place
        assert mine.data_ptr() % weights.ALIGNMENT == 0, place


class Unsaved(nn.Module):
    def __init__(self, values):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, groups=3)
        self.hidden = {"scales": [values()]}


@pytest.mark.parametrize("values", [lambda: torch.empty(3).normal_(), lambda: torch.randn(3)], ids=["empty", "randn"])
def test_a_model_with_random_values_that_no_file_has_is_built(monkeypatch, values):
    monkeypatch.setattr("dcls_convert.networks.source._build", lambda *_, **__: Unsaved(values))
    model = build_model(ModelSource(name="timm:x"), device="meta", trust_code=True)
    assert not assign_weights_(model, Unsaved(values).state_dict(), "file")


def test_the_users_own_code_is_run_once(monkeypatch):
    calls = []
    monkeypatch.setattr("builtins.build_own", lambda: calls.append(1) or nn.Linear(2, 2), raising=False)
    build_with_state(ModelSource(name="builtins:build_own"), nn.Linear(2, 2).state_dict(), "file")
    assert calls == [1]


class Allocated(TorchDispatchMode):
    """Bytes of all memory that operators allocate on the CPU."""

    def __init__(self):
        super().__init__()
        self.memories, self.most = {}, 0  # none is taken for freed: an upper bound

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in known and memory.nbytes():
                    self.memories[memory.data_ptr()] = memory.nbytes()
        self.most = max(self.most, sum(self.memories.values()))
        return result


def test_loading_allocates_no_second_model(tmp_path):
    source = ModelSource(name="timm:test_convnext")
    save_file(build_model(source).state_dict(), tmp_path / "w.safetensors")
    state = read_weights(tmp_path / "w.safetensors")
    pointers = {name: tensor.data_ptr() for name, tensor in state.items()}
    with Allocated() as counted:
        model = build_model(source, device="meta")
        assert assign_weights_(model, state, "file")
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == pointers
    assert counted.most < 0.05 * sum(tensor.nbytes for tensor in state.values())


def test_views_of_one_memory_become_tensors_of_their_own():
    whole = torch.arange(8.0)
    model = nn.Linear(4, 1, device="meta")
    assert assign_weights_(model, {"weight": whole[:4].reshape(1, 4), "bias": whole[4:5]}, "file")
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(whole, torch.arange(8.0))
    assert model.bias.item() == 4


def test_another_precision_in_the_file_becomes_the_models():
    model = nn.Linear(4, 1, device="meta")
    state = nn.Linear(4, 1).half().state_dict()
    assert assign_weights_(model, state, "file")
    assert model.weight.dtype == torch.float32
    assert torch.equal(model.weight, state["weight"].float())


def test_the_command_draws_no_weights_that_a_file_has(tmp_path, monkeypatch, capsys):
    save_file(build_model(ModelSource(name="timm:test_convnext"), seed=3).state_dict(), tmp_path / "w.safetensors")
    arguments = ["timm:test_convnext", "--dilated-size", "9", "--init", "largest", "-q"]
    arguments += ["--checkpoint", str(tmp_path / "w.safetensors"), "--output"]
    folders = [tmp_path / "assigned", tmp_path / "ordinary"]
    real, drawn = build_model, []
    monkeypatch.setattr(
        weights, "build_model", lambda *a, **k: drawn.extend([a] * (k.get("device") != "meta")) or real(*a, **k)
    )
    for folder in folders:
        run(*arguments, folder)
        assert len(drawn) == folders.index(folder)
        monkeypatch.setattr(weights, "assign_weights_", lambda *_, **__: False)
    capsys.readouterr()
    for path in sorted(folders[0].iterdir()):
        assert path.read_bytes() == (folders[1] / path.name).read_bytes(), path.name
    loaded = load_converted(folders[0])
    saved = load_file(folders[0] / "model.safetensors")
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, saved[name])


# Writing.


def test_writing_allocates_no_second_model(tmp_path):
    model, plan = convert()
    gc.collect()
    with Allocated() as counted:
        write_files(model, plan, tmp_path, {}, {}, fingerprint=False)
    assert counted.most < 0.05 * sum(tensor.nbytes for tensor in model.state_dict().values())
    written = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(tensor, written[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", ["timm:test_convnext", "timm:test_efficientnet"])
def test_a_checkpoint_is_loaded_without_drawing_weights(tmp_path, monkeypatch, name):
    folder = save_converted(*convert(name, seed=1), tmp_path / "folder")
    wanted = load_converted(folder, model=build_model(ModelSource(name=name), seed=2))
    monkeypatch.setattr(weights, "load_weights_", lambda *_, **__: pytest.fail("weights are drawn"))
    check_equal_tensors(load_converted(folder), wanted)
