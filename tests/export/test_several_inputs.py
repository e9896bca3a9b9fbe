"""A network that takes anything but one image goes the whole way, with equal outputs."""

import onnxruntime
import pytest

from dcls_convert import convert_, save_converted
from dcls_convert.checkpoints.stored_weights import read_stamp
from dcls_convert.export.fold import fold_folder
from dcls_convert.running.arguments import describe_inputs, random_arguments
from dcls_convert.running.input_spec import with_batch

from ..command_line import run
from ..several_inputs import EXAMPLES, ThreeInputs
from .running import FLOAT32_ERROR, error_of

NETWORKS = pytest.mark.parametrize("build", EXAMPLES, ids=lambda build: build.__name__)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Converted and saved in Python. Tests must not write to them."""
    folder = tmp_path_factory.mktemp("several")
    for build in EXAMPLES:
        model = build()
        report = convert_(
            model,
            dilated_size=7,
            example_inputs=EXAMPLES[build],
            init="random",
            positions="uniform",
        )
        assert report.macs.delta > 0
        save_converted(model, report.plan, folder / build.__name__)
    return folder


def factory_of(build):
    return f"{build.__module__}:{build.__name__}"


@NETWORKS
def test_the_folder_is_verified_by_its_outputs(folders, build):
    folder = folders / build.__name__
    assert read_stamp(folder / "model.safetensors").fingerprint.outputs
    out = run("verify", folder, "--model", factory_of(build))[0]
    assert "match the stored ones" in out


@NETWORKS
@pytest.mark.parametrize("format", ["timm", "pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_each_format_takes_the_inputs_of_forward(folders, build, format):
    checkpoint = folders / build.__name__
    report = fold_folder(checkpoint, format, model=factory_of(build))
    assert report.batch is None
    for batch in (2, 5):
        inputs = with_batch(describe_inputs(EXAMPLES[build]), batch)
        arguments = random_arguments(inputs, seed=1)
        assert error_of(checkpoint, report, arguments, build) < FLOAT32_ERROR
    if format == "onnx" and build is ThreeInputs:
        session = onnxruntime.InferenceSession(report.output)
        assert [entry.name for entry in session.get_inputs()] == ["image", "label", "time"]
