"""Weights files, also damaged or malicious ones, are read as they are or refused in one line.

Code in them never runs.
"""

import contextlib
import io
import json
import os
import re
import struct
import zipfile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from dcls_convert.errors import CheckpointError
from dcls_convert.weights.files import MAX_HEADER_BYTES, read_weights
from dcls_convert.weights.loading import load_weights_

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
FIRST = "0.weight"  # first tensor of `network`
RAN = []  # calls made by pickles


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stage = nn.Sequential(
            nn.Conv2d(4, 4, 3, 1, 1, groups=4),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 5, 1, 2, groups=4),
        )
        pool = nn.AdaptiveAvgPool2d(1)
        return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), stage, pool, nn.Flatten(), nn.Linear(4, 3))


def ran(*args):
    RAN.append(args)
    return torch.zeros(1)


class Payload:
    def __reduce__(self):
        return ran, ("payload",)


def nested(depth):
    """A tuple that holds the same tuple twice, and so on: small in a file, 2**depth as text."""
    return () if depth == 0 else (nested(depth - 1),) * 2


CHANGES = {  # change of a tensor, and the file's error; None if the file is still read
    "NaN": (lambda t: t * torch.nan, r"has \d+ of \d+ values that are NaN or infinite"),
    "integers": (lambda t: t.int(), r"is torch\.int32, the model needs torch\.float32"),
    "complex": (
        lambda t: t.to(torch.complex64),
        r"is torch\.complex64, the model needs torch\.float32",
    ),
    "empty": (lambda t: t[:0], r"has shape \(0, 3, 3, 3\), the model needs \(4, 3, 3, 3\)"),
    "meta": (lambda t: t.to("meta"), "is without data"),
    "sparse": (
        lambda t: t.to_sparse(),
        r"is torch\.sparse_coo; weights must be ordinary dense tensors",
    ),
    "quantised": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "is quantized"),
    "packed bits": (
        lambda t: t.contiguous().view(torch.uint8).view(torch.bits8),
        r"is torch\.bits8; weights must be",
    ),
    "no tensor": (lambda t: t.tolist(), "is a list, not a tensor"),
    "payload": (lambda t: Payload(), r"save its state dict alone, torch\.save"),
    "transposed": (lambda t: t.transpose(0, -1).contiguous().transpose(0, -1), None),
    "expanded": (lambda t: t.reshape(-1)[:1].expand(t.numel()).view(t.shape), None),
    "double": (lambda t: t.double(), None),
    "float8": (lambda t: t.to(torch.float8_e4m3fn), None),
    "parameter": (nn.Parameter, None),
}


def torch_file(content):
    """Return a function that saves `content(state)` with torch.save."""
    return lambda state, path: torch.save(content(state), path)


def holding_itself(_):
    content = {}
    content["model"] = content
    return content


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


def with_header(length, header=b"{}"):
    """Return a function that writes a safetensors file which claims this header length."""
    return lambda _, path: path.write_bytes(struct.pack("<Q", length) + header)


NEITHER = r"give a safetensors file or one of torch.save; this is neither$"
NO_SAFETENSORS = "not a readable safetensors file"
DAMAGES = {
    "missing.pth": (lambda *_: None, "there is no such file"),
    "folder.pth": (lambda _, path: path.mkdir(), "this folder has no file of weights"),
    "pipe.pth": (lambda _, path: os.mkfifo(path), "is not a file"),
    "broken link.pth": (lambda _, path: path.symlink_to("nowhere"), "is a broken link"),
    "empty.pth": (lambda _, path: path.touch(), "is empty; download or save it again$"),
    "text.txt": (lambda _, path: path.write_text("my weights"), NEITHER),
    "cut.pth": (cut, r"download or save it again; it is damaged \(\w+\)$"),
    "whole model.pth": (torch_file(lambda _: network()), r"save its state dict alone, torch\.save"),
    "long header.safetensors": (
        with_header(MAX_HEADER_BYTES + 1, b"{" + b" " * (MAX_HEADER_BYTES - 1) + b"}"),
        "header has 16,777,217 bytes; at most 16,777,216 are allowed",
    ),
    "short header.safetensors": (with_header(100), NO_SAFETENSORS),
    "compressed.pth": (
        compressed,
        r"its parts unpack to 4,19\d,\d+ bytes, more than 20 times the file's size",
    ),
    "code.pth": (
        torch_file(lambda _: Payload()),
        r"more than tensors \(tests[.\w]*\.ran\), which would run code, .* \(UnpicklingError\)$",
    ),
    "tensor.pth": (
        torch_file(lambda _: torch.zeros(3)),
        r"holds a Tensor, not a state dict \(names to tensors\)",
    ),
    "holds itself.pth": (
        torch_file(holding_itself),
        "holds a mapping with model, not a state dict",
    ),
    "no tensors.pth": (
        torch_file(lambda _: {nested(20): 1, "a": 2}),
        "holds a mapping with a, not a state dict",
    ),
    "more than tensors.pth": (
        torch_file(lambda s: s | {"epoch": 3}),
        "entry 'epoch' is a int, not a tensor",
    ),
    "one missing.pth": (
        torch_file(lambda s: {n: s[n] for n in s if n != FIRST}),
        f"does not fit the model; missing: {FIRST}$",
    ),
    "one too many.pth": (
        torch_file(lambda s: s | {"x": torch.zeros(1)}),
        "does not fit the model; unexpected: x$",
    ),
    "named twice.pth": (
        torch_file(lambda s: s | {f"module.{FIRST}": s[FIRST]}),
        f"does not fit the model; unexpected: module.{FIRST}$",
    ),
    "long name.pth": (
        torch_file(lambda s: s | {"\0" + "x" * 5000: 3}),
        r"entry '\\\\x00xx.*xx' is a int",
    ),
    "tuple as key.pth": (
        torch_file(lambda s: {"epoch": 1, "model": {nested(20): torch.ones(2), **s}}),
        "has keys of type tuple; weights have names",
    ),
    **{
        f"{change}.pth": (torch_file(lambda s, make=make: s | {FIRST: make(s[FIRST])}), says)
        for change, (make, says) in CHANGES.items()
        if says is not None
    },
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
        load_weights_(model, read_weights(path), f"checkpoint {path}")
    check_line(refused.value)
    assert str(refused.value).startswith(f"checkpoint {path}: ")
    assert RAN == []
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def check_line(error):
    assert re.fullmatch(r".{1,700}", str(error))
    assert str(error).isprintable()


@pytest.mark.parametrize("write", [torch_file(dict), lambda s, path: path.write_bytes(save(s))])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ""])
def test_the_first_bytes_say_what_a_file_is_not_its_suffix(tmp_path, write, suffix):
    state = network().state_dict()
    path = tmp_path / f"weights{suffix}"
    write(state, path)
    read = read_weights(path)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@st.composite
def states(draw):
    """The network's state dict, with unusual entries, under other names, or wrapped."""
    state = network().state_dict()
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(sorted(state)))
        (make, _) = CHANGES[draw(st.sampled_from(sorted(CHANGES)))]
        with contextlib.suppress(Exception):  # a scalar has no rows, a list is no tensor, ...
            state[draw(st.sampled_from([name, name, f"module.{name}", "more"]))] = make(state[name])
    if draw(st.integers(0, 9)) == 0:
        state[
            draw(st.integers() | st.none() | st.tuples(st.integers()) | st.binary(max_size=3))
        ] = torch.ones(2)
    for _ in range(draw(st.integers(0, 2))):
        state = {
            draw(st.sampled_from(["state_dict", "model", "state_dict_ema", "epoch"])): state,
            "lr": 0.1,
        }
    return state


@st.composite
def torch_files(draw):
    buffer = io.BytesIO()
    with contextlib.suppress(Exception):  # what torch cannot write
        torch.save(draw(states()), buffer, _use_new_zipfile_serialization=draw(st.booleans()))
    return ".pth", damaged(draw, buffer.getvalue())


@st.composite
def safetensors_files(draw):
    data = save({name: tensor.contiguous() for name, tensor in network().state_dict().items()})
    if draw(st.booleans()):  # another header, which may say anything
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        entry = header[draw(st.sampled_from(sorted(header)))]
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        odd = [
            "F64",
            "I8",
            "F8_E4M3",
            "",
            None,
            3,
            [],
            [0],
            [2**40],
            [-1, 3],
            [0, 8],
            [8, 0],
            [2**63, 2**63],
        ]
        entry[key] = draw(
            st.sampled_from([*odd, *(other.get("data_offsets") for other in header.values())])
        )
        text = json.dumps(header).encode()
        if draw(st.integers(0, 3)) == 0:  # each key twice
            text = text[:-1] + b", " + text[1:]
        data = struct.pack("<Q", len(text)) + text + data[8 + size :]
    return ".safetensors", damaged(draw, data)


def damaged(draw, data):
    data = bytearray(data)
    for _ in range(draw(st.sampled_from([0, 0, 1, 3, 30])) if data else 0):
        data[draw(st.integers(0, min(len(data) - 1, 2000)))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


@given(torch_files() | safetensors_files())
@pytest.mark.filterwarnings("ignore")
def test_any_file_is_read_as_it_is_or_refused_in_one_line(tmp_path, file):
    suffix, data = file
    path = tmp_path / f"weights{suffix}"
    model = network()
    path.write_bytes(data)
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


def test_a_url_is_refused_with_all_its_slashes():
    with pytest.raises(
        CheckpointError, match=r"checkpoint https://a\.org/w\.pth: download it first"
    ):
        read_weights("https://a.org/w.pth")
