"""Weights files, mutated and made to harm: refused in one line, or read as they are; no code of theirs runs."""

import contextlib
import functools
import io
import json
import os
import pickle
import struct
import warnings
import zipfile

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

from dcls_convert import convert_from_authors_, find_convs, plan_conversion
from dcls_convert.networks.weights import MOST_HEADER, load_weights_, read_weights

from ..test_pipeline import theirs
from .campaign import Finding, refusal
from .nets import build
from .texts import plain, texts

pytestmark = pytest.mark.campaign

GROWN = 4 << 20  # bytes, of which a few thousand are left when they are packed
RAN = []  # what a pickle would call


def ran(*_args):
    RAN.append(_args)
    return torch.zeros(1)


class Payload:
    def __reduce__(self):
        return ran, ("payload",)


def odd_tensors():
    """Tensors that are not what a network's weights are."""
    return {
        "NaN": lambda t: t * torch.nan,
        "integers": lambda t: t.int(),
        "complex": lambda t: t.to(torch.complex64),
        "empty": lambda t: t[:0],
        "scalar": lambda t: t.sum(),
        "transposed": lambda t: t.transpose(0, -1) if t.dim() else t,
        "expanded": lambda t: t.reshape(-1)[:1].expand(t.numel()).view(t.shape) if t.numel() else t,
        "sparse": lambda t: t.to_sparse(),
        "meta": lambda t: t.to("meta"),
        "quantised": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
        "half": lambda t: t.half(),
        "parameter": nn.Parameter,
        "one more row": lambda t: torch.cat([t, t[:1]]) if t.dim() else t,
        "overlapping": lambda t: t.reshape(-1).as_strided(t.shape, [1] * t.dim()),
        "not a tensor": lambda t: t.tolist(),
        "a payload": lambda t: Payload(),
        "infinite": lambda t: t + torch.inf,
        "double": lambda t: t.double(),
        "float8": lambda t: t.to(torch.float8_e4m3fn),
        "bits": lambda t: t.contiguous().view(torch.uint8).view(torch.bits8),
    }


@st.composite
def states(draw):
    """A state dict of the network with some entries changed, gone or new."""
    state = dict(build().state_dict())
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(state)))
        change = draw(st.sampled_from(sorted(odd_tensors())))
        value = state[name]
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout == torch.strided:
            state[name] = odd_tensors()[change](value)
        if draw(st.booleans()):
            state[draw(texts)] = state.pop(name) if draw(st.booleans()) else state[name]
    if draw(st.integers(0, 4)) == 0:
        state[draw(st.integers() | st.none() | st.tuples(st.integers()) | st.binary(max_size=3))] = torch.ones(2)
    if draw(st.integers(0, 9)) == 0:
        state["module." + sorted(map(str, state))[0]] = torch.ones(1)
    if draw(st.integers(0, 19)) == 0:
        power = draw(st.sampled_from([3, 3, 4, 4, 4, 5, 5, 5, 5, 6]))
        state |= {f"more.{number}": 0 for number in range(10**power)}
    for _ in range(draw(st.integers(0, 2))):
        state = {draw(st.sampled_from(["state_dict", "model", "state_dict_ema", "epoch"])): state, "more": draw(plain)}
    if draw(st.integers(0, 9)) == 0:  # it holds itself
        state["model"] = state
    return state


@st.composite
def nearly_whole(draw):
    """A state dict that differs in one tensor, and not in its name."""
    state = dict(build().state_dict())
    name = draw(st.sampled_from(sorted(state)))
    return state | {name: odd_tensors()[draw(st.sampled_from(sorted(odd_tensors())))](state[name])}


@st.composite
def named_twice(draw):
    """A torch file in which one name has two values."""
    state = dict(build().state_dict())
    name = draw(st.sampled_from(sorted(state)))
    buffer = io.BytesIO()
    torch.save(state | {"module." + name: state[name] + 1}, buffer)
    return buffer.getvalue()


@st.composite
def grown(draw):
    """A torch file, compressed, of which a part unpacks to much more than the others."""
    source, buffer = io.BytesIO(), io.BytesIO()
    torch.save(dict(build().state_dict()), source)
    number = draw(st.integers(0, 9))
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for place, part in enumerate(old.infolist()):
            new.writestr(part.filename, old.read(part) + bytes(GROWN if place == number else 0))
    return buffer.getvalue()


@st.composite
def torch_files(draw):
    buffer = io.BytesIO()
    try:
        torch.save(draw(states() | nearly_whole()), buffer, _use_new_zipfile_serialization=draw(st.booleans()))
    except Exception:  # torch does not write it
        return b""
    return _damaged(draw, buffer.getvalue())


@st.composite
def pickles(draw):
    """Pickles by themselves, and as the data of a zip file of torch's."""
    data = pickle.dumps(draw(plain | st.just(Payload()) | st.just([Payload()] * 3)), protocol=draw(st.integers(0, 4)))
    if draw(st.booleans()):
        return _damaged(draw, data)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in {"a/data.pkl": data, "a/version": b"3\n", "a/byteorder": b"little"}.items():
            file.writestr(name, content)
    return _damaged(draw, buffer.getvalue())


@st.composite
def safetensors_files(draw):
    state = {name: tensor.contiguous() for name, tensor in build().state_dict().items()}
    data = save(
        state, metadata=draw(st.none() | st.dictionaries(st.text("abc", max_size=3), st.text("xyz", max_size=9)))
    )
    if draw(st.booleans()):  # another header, which may say anything
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        entry = header[draw(st.sampled_from(sorted(header)))]
        key = draw(st.sampled_from(["dtype", "shape", "data_offsets", "more"]))
        odd = ["F64", "BF16", "I8", "F8_E4M3", [], [0], [2**40], [-1, 3], [0, 8], [8, 0], [2**63, 2**63]]
        others = [other.get("data_offsets") for other in header.values()]  # where another one lies
        entry[key] = draw(st.sampled_from(odd) | plain | st.sampled_from(others))
        text = json.dumps(header).encode()
        if draw(st.integers(0, 3)) == 0:  # each key twice
            text = text[:-1] + b", " + text[1:]
        data = struct.pack("<Q", len(text)) + text + data[8 + size :]
    return _damaged(draw, data)


@functools.cache
def long_header(kind):
    """A safetensors file whose header is as long as it says, and longer than any model needs."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    match kind:
        case "a name":
            header = {"a" * MOST_HEADER: entry}
        case "names":
            header = {f"{number}": entry for number in range(MOST_HEADER // 60)}
        case "metadata":
            header = {"__metadata__": {f"{number}": "" for number in range(MOST_HEADER // 8)}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def lying_length(length):
    """A safetensors file whose header says that it is as long as this."""
    return struct.pack("<Q", length) + b"{}"


@functools.cache
def of_authors():
    """The network as the authors' package has it; the convolutions that a window of 7 would replace."""
    plan = plan_conversion(find_convs(build(), (3, 32, 32)), dilated_size=7, kernel_count=3)
    return theirs(build(), plan)


@st.composite
def changed_of_authors(draw):
    """Of which some entries are odd, gone or beside others."""
    state = dict(of_authors())
    elements = sorted(name for name in state if name.endswith(".P") or name[:-6] + "P" in state)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(elements) | st.sampled_from(sorted(state)))
        if not isinstance(state.get(name), torch.Tensor):  # gone, or odd already
            continue
        change = draw(st.sampled_from([*odd_tensors(), "cut", "one more axis", "far", "spread", "gone"]))
        size, factor = draw(st.integers(0, 2)), draw(st.sampled_from([0.0, 10.0, 1e30]))
        tensor = state.pop(name)
        with contextlib.suppress(RuntimeError, IndexError), warnings.catch_warnings(action="ignore"):  # of odd ones
            match change:
                case "cut":
                    state[name] = tensor[..., :size]
                case "one more axis":
                    state[name] = tensor[None]
                case "far":
                    state[name] = tensor * factor
                case "spread":
                    state |= {name: tensor, name.rpartition(".")[0] + ".SIG": tensor.clone()}
                case odd if odd in odd_tensors():
                    state[name] = odd_tensors()[odd](tensor)
    return state


def _damaged(draw, data):
    data = bytearray(data)
    for _ in range(draw(st.sampled_from([0, 0, 1, 3, 30]))):
        if data:
            data[draw(st.integers(0, min(len(data) - 1, 2000)))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


def test_authors_weights(campaign, tmp_path):
    def check(given):
        state, version, interpolation = given
        model = build()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        RAN.clear()
        report, _ = refusal(
            lambda: convert_from_authors_(
                model, state, version=version, dilated_size=7, interpolation=interpolation, input_size=(3, 32, 32)
            )
        )
        if RAN:
            raise Finding("code of an entry was run")
        after = model.state_dict()
        if report is None:
            if after.keys() != before.keys() or not all(torch.equal(after[name], before[name]) for name in before):
                raise Finding("refused, and the model is another one")
            return False
        for name, tensor in after.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise Finding(f"{name} is not finite")
        if version == "v1" or interpolation != "bilinear":  # these elements are normalised
            return True
        for name in (name.removesuffix("P") + "weight" for name in state if name.endswith(".P")):
            elements, wanted = (part.flatten().sort().values for part in (after[name], state[name].to(after[name])))
            if not torch.equal(elements, wanted):
                raise Finding(f"{name} has other elements than it was given")
        return True

    versions, interpolations = (
        st.sampled_from([None, "v0", "v1"]),
        st.sampled_from(["bilinear", "triangle", "gaussian"]),
    )
    campaign.run(st.tuples(changed_of_authors(), versions, interpolations), check, folder=tmp_path)


def test_weights_files(campaign, tmp_path):
    own = {name: tensor.clone() for name, tensor in build().state_dict().items()}

    def check(given):
        suffix, wrong, data = given
        path = tmp_path / f"weights{suffix}"
        path.unlink(missing_ok=True)
        os.mkfifo(path) if data is None else path.write_bytes(data)
        RAN.clear()
        state, _ = refusal(lambda: read_weights(path))
        if RAN:
            raise Finding("code of the file was run")
        if state is None:
            return False
        if wrong:
            raise Finding("was read")
        if not all(isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in state.items()):
            raise Finding("not names to tensors")
        model = build()
        model.load_state_dict(own)
        _, refused = refusal(lambda: load_weights_(model, state, "the file"))
        wanted = own if refused else state
        for name, tensor in model.state_dict().items():
            if not torch.equal(tensor, wanted[name].to(tensor.dtype)):
                raise Finding(f"{name} has other values than the {'old model' if refused else 'file'}")
        return refused is None

    made = st.one_of(torch_files(), torch_files(), torch_files(), pickles(), st.just(None))
    tensors = safetensors_files() | st.sampled_from([lying_length(2**63), lying_length(100 << 20), None])
    headers = st.sampled_from(["a name", "names", "metadata"]).map(long_header)

    def files(suffix, data, *, wrong=False):
        return st.tuples(st.just(suffix), st.just(wrong), data)

    usual = st.one_of(*[files(".pth", made)] * 2, *[files(".safetensors", tensors)] * 2)
    wrong = files(".pth", named_twice() | grown(), wrong=True) | files(".safetensors", headers, wrong=True)
    most = st.integers(0, 2**32).map(lambda number: number % 20 != 7)  # evenly; hypothesis likes borders
    campaign.run(most.flatmap(lambda each: usual if each else wrong), check, folder=tmp_path)
