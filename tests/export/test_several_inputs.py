"""A network of several inputs goes the whole way on the command line, with equal outputs."""

import json

import onnxruntime
import pytest
import torch
from torch.utils._pytree import tree_leaves

from dcls_convert import find_convs, load_converted
from dcls_convert.checkpoints.stamp import read_stamp
from dcls_convert.input_sizes import input_size_text
from dcls_convert.networks.inputs import random_inputs
from dcls_convert.networks.model_outputs import max_relative_error

from ..command_line import run
from ..several_inputs import SIZES, ThreeInputs
from .running import FLOAT32_ERROR
from .test_metadata import facts_of_file

NETWORKS = pytest.mark.parametrize("build", SIZES, ids=lambda build: build.__name__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Converted by the command line, as its user does. Tests must not write to them."""
    folder = tmp_path_factory.mktemp("several")
    for build in SIZES:
        run(*convert(build), "--positions", "uniform", "--output", folder / build.__name__)
    return folder


def convert(build):
    size = input_size_text(SIZES[build])
    return f"{build.__module__}:{build.__name__}", "--dilated-size", 7, "--input-size", size


@NETWORKS
def test_the_costs_are_known_before_anything_is_built(build):
    report = json.loads(run(*convert(build), "--dry-run", "--json")[0])
    assert report["input_size"] == [list(size) for size in SIZES[build]]
    assert report["macs"]["before"] == find_convs(build(), SIZES[build]).macs
    assert report["macs"]["delta"] > 0


@NETWORKS
def test_the_folder_is_verified_by_its_outputs(folders, build):
    folder = folders / build.__name__
    assert read_stamp(folder / "model.safetensors").fingerprint.outputs
    assert "match the stored ones" in run("verify", folder, "--trust-code")[0]


@NETWORKS
@pytest.mark.parametrize("format", ["timm", "pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_each_format_takes_the_inputs_of_forward(folders, build, format):
    checkpoint = folders / build.__name__
    fold = ["fold", checkpoint, "--trust-code", "--format", format, "--json"]
    written = json.loads(run(*fold)[0])
    assert written["batch"] is None
    assert written["input_size"] == [list(size) for size in SIZES[build]]
    for batch in (1, 2, 5):
        inputs = random_inputs(SIZES[build], batch, seed=1)
        with torch.no_grad():
            expected = load_converted(checkpoint, trust_code=True).eval()(*inputs)
        outputs = RUN[format](written["output"], inputs)
        assert max_relative_error(tree_leaves(expected), tree_leaves(outputs)) < FLOAT32_ERROR


def run_folder(folder, inputs):
    with torch.no_grad():
        return load_converted(folder, trust_code=True).eval()(*inputs)


def run_pt2(file, inputs):
    with torch.no_grad():
        return torch.export.load(file).module()(*inputs)


def run_onnx(file, inputs):
    """Run the file with its inputs given by the names that its metadata states."""
    facts = facts_of_file(file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    arrays = [tensor.numpy() for tensor in inputs]
    outputs = session.run(None, dict(zip(json.loads(facts["input_name"]), arrays, strict=True)))
    return list(map(torch.from_numpy, outputs))


RUN = {"timm": run_folder, "pt2": run_pt2, "onnx": run_onnx}


def test_files_name_the_inputs_as_forward_does(folders):
    run("fold", folders / "ThreeInputs", "--trust-code", "--format", "pt2", "--output", "x.pt2")
    facts = facts_of_file("x.pt2")
    assert facts["input_name"] == ["image", "vector", "time"]
    assert facts["input_size"] == [list(size) for size in SIZES[ThreeInputs]]
