"""Weights files, also damaged or malicious ones, are read as they are or refused in one line.

Code in them never runs.
"""

import io
import os
import re
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import read_weights
from dcls_convert.weights.loading import load_weights_

FIRST = "0.weight"  # first tensor of `network`
RAN = []  # calls made by pickles


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stage = nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1, groups=4), nn.BatchNorm2d(4))
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), stage, pool, nn.Flatten(), nn.Linear(4, 3))


def check_equal(read, state):
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


def ran(*args):
    RAN.append(args)
    return torch.zeros(1)


class Payload:
    def __reduce__(self):
        return ran, ("payload",)


def torch_file(content):
    """Return a function that saves `content(state)` with torch.save."""
    return lambda state, path: torch.save(content(state), path)


def with_first(change):
    """Return a function that saves the state dict with its first tensor changed."""
    return torch_file(lambda state: state | {FIRST: change(state[FIRST])})


def data(content):
    return lambda _, path: path.write_bytes(content)


def compressed(state, path):
    """Write a compressed torch file of zeros, which torch itself could read."""
    source = io.BytesIO()
    torch.save({"a": torch.zeros(1 << 20)}, source)
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))


def cut(state, path):
    """Write the first half of a torch file."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue()[: len(buffer.getvalue()) // 2])


NEITHER = "is neither a safetensors file nor a torch.save file, or it is damaged; it begins with "
NO_SAFETENSORS = "not a readable safetensors file"
DAMAGES = {
    "missing.pth": (lambda *_: None, "there is no such file"),
    "folder.pth": (lambda _, path: path.mkdir(), "is not a file$"),
    "pipe.pth": (lambda _, path: os.mkfifo(path), "is not a file"),
    "empty.pth": (data(b""), f"{NEITHER}''$"),
    "page.pth": (data(b"<!DOCTYPE html><html>"), f"{NEITHER}'<!DOCTYPE html><html>'$"),
    "pointer.safetensors": (
        data(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"),
        NEITHER + r"'version https://git-lfs.github.com/spec/v1\\noid sha256:00\\nsize 9\\n'$",
    ),
    "cut.pth": (cut, NEITHER + r"'PK\\x03\\x04.*data\.pkl"),
    "compressed.pth": (compressed, r"unpacks to 4,19\d,\d+ bytes, more than the file has"),
    "whole model.pth": (
        torch_file(lambda _: network()),
        r"objects other than tensors \(torch\.nn\.modules\.batchnorm.*Save the state dict alone",
    ),
    "short header.safetensors": (
        data(struct.pack("<Q", 100) + b"{}"),
        f"{NO_SAFETENSORS}: .*; if it was cut short, copy or download it again$",
    ),
    "tensor.pth": (
        torch_file(lambda _: torch.zeros(3)),
        r"holds a Tensor, not a state dict \(names to tensors\)",
    ),
    "one missing.pth": (
        torch_file(lambda s: {n: s[n] for n in s if n != FIRST}),
        f"does not fit the model; missing: {FIRST}$",
    ),
    "pruned.pth": (
        torch_file(lambda s: {f"{n}_orig" if n == FIRST else n: t for n, t in s.items()}),
        f"missing: {FIRST}; unexpected: {FIRST}_orig; undo what has renamed them, such as .*prune",
    ),
    "counted.pth": (
        torch_file(lambda s: {**s, "total_ops": torch.zeros(1)}),
        "unexpected: total_ops; delete these entries, and save the weights again$",
    ),
    "long header.safetensors": (
        data(struct.pack("<Q", 10_000_001) + b"{" + b" " * 10_000_000),
        "its header has 10,000,001 bytes; at most 10,000,000 are read",
    ),
    "NaN.pth": (
        with_first(lambda tensor: tensor * torch.nan),
        r"has \d+ of \d+ values that are NaN or infinite",
    ),
    "integers.pth": (
        with_first(torch.Tensor.int),
        r"is torch\.int32, the model needs torch\.float32",
    ),
    "no rows.pth": (
        with_first(lambda tensor: tensor[:0]),
        r"has shape \(0, 3, 3, 3\), the model needs \(4, 3, 3, 3\)",
    ),
    "sparse.pth": (
        with_first(torch.Tensor.to_sparse),
        r"is sparse \(torch\.sparse_coo\); weights must be",
    ),
    "payload.pth": (with_first(lambda _: Payload()), r"Save the state dict alone: torch\.save"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_each_damage_is_an_error_of_one_line_and_the_model_stays_as_it_is(tmp_path, name):
    write, says = DAMAGES[name]
    path = tmp_path / name
    model = network()
    write(model.state_dict(), path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    RAN.clear()
    with pytest.raises(CheckpointError, match=says) as refused:
        load_weights_(model, read_weights(path), f"weights file {path}")
    check_line(refused.value)
    assert str(refused.value).startswith(f"weights file {path}: ")
    assert RAN == []
    check_equal(model.state_dict(), before)


def check_line(error):
    assert re.fullmatch(r".{1,600}", str(error))
    assert str(error).isprintable()


def test_a_url_is_refused_with_all_its_slashes():
    with pytest.raises(
        CheckpointError, match=r"weights file https://a\.org/w\.pth: download it first"
    ):
        read_weights("https://a.org/w.pth")


@pytest.mark.parametrize("write", [torch_file(dict), save_file])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ""])
def test_the_first_bytes_say_what_a_file_is_not_its_suffix(tmp_path, write, suffix):
    state = network().state_dict()
    write(state, path := tmp_path / f"weights{suffix}")
    check_equal(read_weights(path), state)


def damaged(draw, content):
    content = bytearray(content)
    for _ in range(draw(st.sampled_from([0, 0, 1, 3, 30]))):
        content[draw(st.integers(0, min(len(content) - 1, 2000)))] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.none() | st.integers(0, len(content)))])


@given(st.data(), st.sampled_from(["safetensors", "zip", "pickle"]))
@pytest.mark.filterwarnings("ignore")
def test_any_file_is_read_as_it_is_or_refused_in_one_line(tmp_path, data, form):
    path = tmp_path / "weights"
    model = network()
    if form == "safetensors":
        save_file(model.state_dict(), path)
    else:
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=form == "zip")
    path.write_bytes(damaged(data.draw, path.read_bytes()))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    RAN.clear()
    try:
        state = read_weights(path)
        load_weights_(model, state, "the file")
        expected = state
    except CheckpointError as error:
        check_line(error)
    assert RAN == []
    assert all(
        torch.equal(own, expected[name].to(own.dtype)) for name, own in model.state_dict().items()
    )
