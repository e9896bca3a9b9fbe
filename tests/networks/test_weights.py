"""Trained weights: from files, from the hub (a faked client), and what conversion keeps of them."""

import argparse
import re
import shutil
import struct
import zipfile
from dataclasses import replace

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

import dcls_convert
from dcls_convert import load_converted
from dcls_convert.checkpoints.folder import read_plan
from dcls_convert.errors import CheckpointError
from dcls_convert.layers.dcls_conv import DclsConv2d
from dcls_convert.networks.weights import MOST_HEADER, load_weights_, read_weights

from ..command_line import run
from ..conftest import TINY

LARGEST = ("--init", "largest", "--output", "out")  # a fit takes seconds


@pytest.fixture
def trained():
    """A network whose weights are no initialisation."""
    torch.manual_seed(7)
    model = timm.create_model(TINY).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: {"state_dict": s, "epoch": 3},
        lambda s: {"model": s, "optimizer": {"lr": 1.0}},
        lambda s: {"model": {k: v * 0 for k, v in s.items()}, "model_ema": s},
        lambda s: {"state_dict": {f"module.{k}": v for k, v in s.items()}, "args": argparse.Namespace(lr=1)},
        lambda s: {f"_orig_mod.module.{k}": v for k, v in s.items()},
        lambda s: {"model": {"state_dict": {f"module._orig_mod.{k}": v for k, v in s.items()}}},
    ],
)
def test_wrappers_and_prefixes_are_understood(tmp_path, trained, wrap):
    torch.save(wrap(trained.state_dict()), tmp_path / "weights.pth")
    assert equal(read_weights(tmp_path / "weights.pth"), dict(trained.state_dict()))


def test_safetensors_are_read(tmp_path, trained):
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    assert equal(read_weights(tmp_path / "weights.safetensors"), dict(trained.state_dict()))


def test_everything_but_the_replaced_kernels_is_kept_exactly(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    save_file(trained.state_dict(), "weights.safetensors")
    run(TINY, "--checkpoint", "weights.safetensors", *LARGEST)
    converted = load_converted("out")
    replaced = {name + ".weight" for name, m in converted.named_modules() if isinstance(m, DclsConv2d)}
    own, old = converted.state_dict(), trained.state_dict()
    assert len(replaced) == 9
    assert all(torch.equal(own[name], old[name]) for name in old.keys() - replaced)


def test_replaced_kernels_keep_their_largest_cells_over_the_tie_group(trained):
    kernels = {name: m.weight.detach().clone() for name, m in trained.named_modules() if name.endswith("conv_dw")}
    report = dcls_convert.convert_(trained, dilated_size=11, init="largest")
    for group in {row.tie_group for row in report.layers if row.tie_group}:
        names = [row.name for row in report.layers if row.tie_group == group]
        energy = sum(kernels[name].square() for name in names).flatten(1)
        count = report.layers[0].kernel_count
        kept = torch.zeros_like(energy, dtype=torch.bool).scatter(1, energy.topk(count).indices, True)
        for name in names:
            expected = torch.where(kept, kernels[name].flatten(1), 0).unflatten(1, (1, 7, 7))
            found = trained.get_submodule(name).kernel()
            assert torch.equal(found[:, :, 2:9, 2:9], expected)
            assert found.count_nonzero() == expected.count_nonzero()  # nothing outside the old kernel


def test_with_every_cell_kept_the_network_is_the_old_one(trained):
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        before = trained(x)
        dcls_convert.convert_(trained, dilated_size=17, kernel_count=49)
        # The same products in another order of summation, float32.
        torch.testing.assert_close(trained(x), before, rtol=1e-4, atol=1e-4)


def test_another_head_starts_afresh_and_says_so(tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    save_file(trained.state_dict(), "weights.safetensors")
    run(TINY, "--checkpoint", "weights.safetensors", "--num-classes", "5", "--dry-run")
    _, err = run(TINY, "--checkpoint", "weights.safetensors", "--num-classes", "5", *LARGEST)
    assert "note: head.fc.weight has another shape in the checkpoint" in err
    converted = load_converted("out")
    assert converted.num_classes == 5
    assert torch.equal(converted.stem[0].weight, trained.stem[0].weight)


def test_mismatches_leave_the_model_alone(trained):
    other = timm.create_model(TINY)
    before = {name: t.clone() for name, t in other.state_dict().items()}
    state = dict(trained.state_dict())
    del state["stem.0.bias"]
    with pytest.raises(CheckpointError, match=r"lacks stem\.0\.bias$"):
        load_weights_(other, state, "file")
    with pytest.raises(CheckpointError, match=r"stem\.0\.bias has shape \(3,\), the model needs \(24,\)"):
        load_weights_(other, state | {"stem.0.bias": torch.zeros(3)}, "file")
    assert equal(other.state_dict(), before)


WRONG = {
    "NaN": (lambda t: t.index_fill(0, torch.tensor([0, 1]), torch.nan), "has 2 of 24 values that are NaN or infinite"),
    "infinite": (lambda t: t.index_fill(0, torch.tensor([0]), -torch.inf), "has 1 of 24 values that are NaN"),
    "integers": (lambda t: t.int(), r"is torch\.int32, the model needs torch\.float32"),
    "booleans": (lambda t: t > 0, r"is torch\.bool, the model needs torch\.float32"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_weights_that_are_not_finite_or_no_fractions_are_refused(tmp_path, monkeypatch, trained, kind, suffix):
    change, says = WRONG[kind]
    monkeypatch.chdir(tmp_path)
    state = trained.state_dict()
    state["stem.0.bias"] = change(state["stem.0.bias"].clone())
    save = torch.save if suffix == "pth" else save_file
    save(state, f"weights.{suffix}")
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"stem\.0\.bias {says}"):
        load_weights_(trained, state, "file")
    assert equal(trained.state_dict(), before)
    for option in ("--force", "--dry-run"):
        _, err = run(TINY, "--checkpoint", f"weights.{suffix}", option, code=2)
        assert re.search(rf"stem\.0\.bias {says}", err)
    assert [path.name for path in tmp_path.iterdir()] == [f"weights.{suffix}"]


def tuples(depth):
    """A tuple that holds one tuple twice, and so on: some bytes in a file, 2**depth in words."""
    return () if depth == 0 else (tuples(depth - 1),) * 2


@pytest.mark.parametrize("key", [tuples(20), 0, b"weight", None], ids=["tuple", "integer", "bytes", "none"])
@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"model": state}, lambda state: {"a": 1, **state}])
def test_keys_that_are_no_names_are_refused_unseen(tmp_path, key, wrap):
    torch.save(wrap({key: torch.ones(2), "b": torch.ones(2)}), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match=rf"weights.pth: has keys of type {type(key).__name__}; "):
        read_weights(tmp_path / "weights.pth")


def test_files_that_take_much_more_memory_than_disk_are_refused(tmp_path):
    """A header without tensors, and a part of a torch file of which only zeros were left out."""
    header = b"{" + b" " * MOST_HEADER + b"}"
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=r"a.safetensors: .*header has 16,777,218 bytes; 16,777,216 are the most"):
        read_weights(tmp_path / "a.safetensors")
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "a.pth")
    with (
        zipfile.ZipFile(tmp_path / "a.pth") as old,
        zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    assert read_weights(tmp_path / "a.pth").keys() == {"a"}
    with pytest.raises(
        CheckpointError, match=r"b.pth: its parts unpack to 4,19\d,\d+ bytes, more than 20 times the file"
    ):
        read_weights(tmp_path / "b.pth")


@pytest.mark.parametrize("dtype", ["bits8", "bits16", "float4_e2m1fn_x2"])
def test_packed_bits_are_no_weights(tmp_path, dtype):
    if not hasattr(torch, dtype):
        pytest.skip("this torch does not have it")
    state = torch.nn.BatchNorm2d(2).state_dict()
    for name in ("weight", "num_batches_tracked"):
        torch.save(state | {name: torch.zeros(4, dtype=torch.uint8).view(getattr(torch, dtype))}, tmp_path / "a.pth")
        with pytest.raises(CheckpointError, match=rf"a.pth: {name} is torch.{dtype}, which torch does not take as num"):
            read_weights(tmp_path / "a.pth")


@pytest.mark.filterwarnings("error")
def test_parameters_are_read_without_a_warning_and_names_are_shown_cut(tmp_path):
    path, linear = tmp_path / "weights.pth", torch.nn.Linear(1, 1)
    torch.save(dict(linear.named_parameters()), path)
    load_weights_(torch.nn.Linear(1, 1), read_weights(path), "the file")
    torch.save({"\0" + "x" * 5000: torch.ones(1, device="meta"), "b": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="without data") as refused:
        read_weights(path)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_masks_and_counters_of_a_model_are_loaded():
    model = torch.nn.BatchNorm2d(2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    state["mask"] = model.mask.T.clone()
    load_weights_(model, state, "file")
    assert model.num_batches_tracked == 1
    assert torch.equal(model.mask, torch.full((2, 2), -torch.inf).tril(-1))
    with pytest.raises(CheckpointError, match="weight has 1 of 2 values"):
        load_weights_(model, state | {"weight": torch.tensor([0.0, -torch.inf])}, "file")


def test_only_the_classifier_may_keep_its_initial_values():
    """A layer whose name begins like the classifier's is none."""
    model = torch.nn.Sequential()
    model.head_conv, model.head = torch.nn.Linear(3, 2), torch.nn.Linear(2, 5)
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    other = state | {"head.weight": torch.ones(7, 2), "head.bias": torch.ones(7)}
    assert load_weights_(model, other, "file", new_classifier=True) == ["head.weight", "head.bias"]
    with pytest.raises(CheckpointError, match=r"head_conv\.weight has shape \(2, 4\)"):
        load_weights_(model, state | {"head_conv.weight": torch.ones(2, 4)}, "file", new_classifier=True)


@pytest.fixture
def hub(tmp_path, monkeypatch, trained):
    """A hub client that serves one repository from a folder, and notes what was asked for."""
    folder = tmp_path / "hub"
    timm.models.save_for_hf(trained, folder, safe_serialization=True)
    asked: list[str] = []

    def download(repo_id=None, filename=None, **_options):
        asked.append(f"{repo_id}/{filename}")
        return str(folder / filename)

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    return asked


def test_pretrained_comes_through_timm(hub, trained):
    run(TINY, "--pretrained", *LARGEST)
    assert hub == [f"timm/{trained.pretrained_cfg['hf_hub_id'].removeprefix('timm/')}/model.safetensors"]
    assert torch.equal(load_converted("out").stem[0].weight, trained.stem[0].weight)


def test_hub_repositories_and_local_folders_are_models(hub, tmp_path, trained):
    run("hf-hub:someone/model", "--pretrained", *LARGEST[:2], "--output", "from-hub")
    run(f"local-dir:{tmp_path / 'hub'}", "--pretrained", *LARGEST[:2], "--output", "from-folder")
    plans = [read_plan(tmp_path / name) for name in ("from-hub", "from-folder")]
    assert {plan.model for plan in plans} == {f"timm:{TINY}"}  # rebuilt without the hub
    shutil.rmtree(tmp_path / "hub")
    for name in ("from-hub", "from-folder"):
        assert torch.equal(load_converted(tmp_path / name).stem[0].weight, trained.stem[0].weight)


def test_unreachable_weights_are_one_line(tmp_path, monkeypatch):
    def download(*_args, **_options):
        raise ConnectionError("the hub\ncannot be reached")

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    _, err = run(TINY, "--pretrained", code=2)
    assert "its pretrained weights cannot be had: ConnectionError: the hub cannot be reached" in err
    assert list(tmp_path.iterdir()) == []


def test_torchvision_weights_come_through_its_own_loader(tmp_path, monkeypatch):
    torch.manual_seed(3)
    state = torchvision.models.shufflenet_v2_x0_5(weights=None).state_dict()
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_args, **_options: state)
    monkeypatch.chdir(tmp_path)
    run("torchvision:shufflenet_v2_x0_5", "--pretrained", "--dilated-size", "9", *LARGEST)
    assert torch.equal(load_converted("out").conv1[0].weight, state["conv1.0.weight"])


def test_a_module_that_asks_for_the_version_of_its_format_loads_from_files_that_keep_none(tmp_path):
    """torchvision's MNASNet does."""
    model = torchvision.models.get_model("mnasnet0_5", num_classes=3)
    report = dcls_convert.convert_(model, init="largest", input_size=(3, 64, 64))
    plan = replace(report.plan, model="torchvision:mnasnet0_5", model_args={"num_classes": 3})
    dcls_convert.save_converted(model, plan, tmp_path / "out")
    loaded = dcls_convert.load_converted(tmp_path / "out")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.state_dict().items())
