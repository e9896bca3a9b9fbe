"""Weights in shards and folders are read; files of other kinds are said for what they are."""

import json
import re
import zipfile

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights

from ..command_line import run


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()


def write_shards(folder, state, suffix=".safetensors"):
    """Write a state dict in two files, as huggingface_hub does; return the index."""
    names = sorted(state)
    parts = (names[::2], names[1::2])
    file_names = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-00002{suffix}"
        shard = {name: state[name] for name in part}
        if suffix == ".safetensors":
            save_file(shard, folder / file)
        else:
            torch.save(shard, folder / file)
        file_names |= dict.fromkeys(part, file)
    index = folder / f"model{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_names}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_read_by_their_index_or_folder_and_one_is_not_taken_for_all(tmp_path, suffix):
    state = network().state_dict()
    index = write_shards(tmp_path, state, suffix)
    (tmp_path / ".hidden.safetensors").write_text("no data")
    (tmp_path / "config.json").write_text("{}")
    notes = []
    for path in (index, tmp_path):
        read = read_weights(path, note=notes.append)
        assert read.keys() == state.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in state.items())
    assert notes == [f"checkpoint {tmp_path}: takes {index.name}"]
    shard = tmp_path / f"model-00002-of-00002{suffix}"
    with pytest.raises(CheckpointError, match=f"is part 2 of 2; .* model{suffix}.index.json$"):
        read_weights(shard)
    index.rename(index.with_suffix(".moved"))
    for path in (shard, tmp_path):
        with pytest.raises(CheckpointError, match=r"is part . of 2; the index .* is missing$"):
            read_weights(path)
    index.with_suffix(".moved").rename(index)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"of-00002.*: there is no such file"):
        read_weights(index)


INDICES = {
    "a file elsewhere": ({"weight_map": {"a": "../w.pth"}}, "is not a file name of weights"),
    "an absolute file": ({"weight_map": {"a": "/w.pth"}}, "is not a file name of weights"),
    "itself": ({"weight_map": {"a": "w.index.json"}}, "is not a file name of weights"),
    "too little": ({"weight_map": {"a": "w.pth", "z": "w.pth"}}, "its files lack z$"),
    "no tensors": ({"weight_map": {"a": "tensor.pth"}}, "holds no state dict"),
    "no names": ({"weight_map": {"a": 3}}, "needs a weight_map of files"),
    "a list": ([1], "needs a weight_map of files"),
}


@pytest.mark.parametrize("kind", INDICES)
def test_an_index_names_files_beside_it_and_no_others(tmp_path, kind):
    content, says = INDICES[kind]
    folder = tmp_path / "folder"
    folder.mkdir()
    for place in (tmp_path, folder):
        torch.save({"a": torch.ones(1)}, place / "w.pth")
    torch.save(torch.ones(1), folder / "tensor.pth")
    index = folder / "w.index.json"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says):
        read_weights(index)
    index.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="not a readable index"):
        read_weights(index)


def test_a_folder_gives_its_one_file_of_weights(tmp_path):
    state = network().state_dict()
    with pytest.raises(CheckpointError, match=r"has no file of weights; it has nothing$"):
        read_weights(tmp_path)
    for file in ("optimizer.pt", "pytorch_model.bin"):
        torch.save(state, tmp_path / file)
    with pytest.raises(CheckpointError, match=r"name one of optimizer.pt, pytorch_model.bin$"):
        read_weights(tmp_path)
    save_file({name: tensor + 1 for name, tensor in state.items()}, tmp_path / "model.safetensors")
    read = read_weights(tmp_path)
    assert all(torch.equal(read[name], tensor + 1) for name, tensor in state.items())


def text(content):
    return lambda path: path.write_bytes(content)


def archive(path):
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("net/model.pth", b"")


def script(path):
    torch.jit.script(network()).save(path)


def export(path):
    torch.export.save(torch.export.export(network(), (torch.randn(1, 3, 8, 8),)), path)


def distributed(path):
    dcp.save(network().state_dict(), checkpoint_id=path.parent / "saved")
    (path.parent / "saved" / "__0_0.distcp").rename(path)


KINDS = {
    "script.pt": (script, "is TorchScript; .* save torch.save"),
    "graph.pt2": (export, "is a graph of torch.export; .* save torch.save"),
    "arrays.npz": (
        lambda path: numpy.savez(path, a=numpy.ones(2)),
        "holds NumPy arrays; save a state dict of tensors",
    ),
    "array.npy": (lambda path: numpy.save(path, numpy.ones(2)), "is a NumPy array; save"),
    "part.distcp": (distributed, r"is a distributed checkpoint \(DCP\); .* dcp_to_torch"),
    "renamed.pth": (distributed, "is a distributed checkpoint"),
    "all.zip": (archive, "is an archive of net/model.pth; unpack it"),
    "packed.pth.gz": (text(b"\x1f\x8b\x08\x00"), "is compressed by gzip; unpack it"),
    "pointer.safetensors": (
        text(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        "is a Git LFS pointer; .* git lfs pull",
    ),
    "page.pth": (text(b"\n<!DOCTYPE html><html></html>"), "is a web page in place of the file"),
    "denied.safetensors": (text(b'<?xml version="1.0"?><Error/>'), "is a web page"),
    "error.bin": (text(b'{"error": "Not Found"}'), "is JSON; name the weights file"),
    "config.json": (text(b"{}"), "is JSON; name the weights file"),
    "keras.h5": (text(b"\x89HDF\r\n\x1a\n"), r"is HDF5 \(Keras\)"),
    "graph.onnx": (text(b"\x08\x07"), "is an ONNX graph"),
    "detectron.pkl": (text(b"\x80\x04\x95"), "is a pickle, which would run code"),
}


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated; there is no process group
@pytest.mark.parametrize("name", KINDS)
def test_a_file_of_another_kind_is_said_for_what_it_is(tmp_path, name):
    write, says = KINDS[name]
    path = tmp_path / name
    write(path)
    with pytest.raises(CheckpointError, match=says) as refused:
        read_weights(path)
    assert str(refused.value).startswith(f"checkpoint {path}: ")
    assert re.fullmatch(r".{1,400}", str(refused.value))


@pytest.mark.filterwarnings("ignore")
def test_the_command_line_says_it_before_anything_is_loaded(tmp_path):
    folder = tmp_path / "saved"
    dcp.save(network().state_dict(), checkpoint_id=folder)
    _, err = run("convert", "resnet18", "--checkpoint", folder, code=2)
    assert "is a distributed checkpoint (DCP)" in err
