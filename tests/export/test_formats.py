"""What `dcls-convert fold` writes gives the outputs of the checkpoint, or it is not written."""

import importlib.metadata
import json
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import get_args

import onnxruntime
import pytest
import torch

import dcls_convert.export.fold
import dcls_convert.export.program
from dcls_convert import fold_to_dense_
from dcls_convert.cli.fold import _lines
from dcls_convert.errors import DclsConvertError, ModelError
from dcls_convert.export.fold import fold_folder
from dcls_convert.export.formats import FORMATS, Format, FormatName

from ..checkpoints.folders import IMAGE
from ..command_line import run
from .running import FLOAT32_ERROR, error_of, images, run_onnx

FILE_FORMATS = ["onnx", "pt2"]


@pytest.mark.slow
@pytest.mark.parametrize("format", FILE_FORMATS)
def test_an_exported_file_gives_the_same_outputs_for_any_batch_size(checkpoints, format):
    written = fold_folder(checkpoints / "convnext", format)
    assert written.batch is None
    assert [path.name for path in Path().iterdir()] == [f"convnext{FORMATS[format].suffix}"]
    for batch in (1, 2, 5):
        assert error_of(checkpoints / "convnext", written, images(batch)) < FLOAT32_ERROR


def test_a_folded_checkpoint_can_be_exported_but_not_folded_again(tmp_path, checkpoints):
    fold_folder(checkpoints / "Plain", "timm", tmp_path / "once", trust_code=True)
    with pytest.raises(
        DclsConvertError, match=r"is folded already, and .*:Plain is not in timm's registry"
    ):
        fold_folder(tmp_path / "once", "timm", tmp_path / "twice", trust_code=True)
    written = fold_folder(tmp_path / "once", "pt2", tmp_path / "x.pt2", trust_code=True)
    assert written.params_before == written.params_after
    assert error_of(checkpoints / "Plain", written, images(2)) < FLOAT32_ERROR
    assert {path.name for path in tmp_path.iterdir()} == {"once", "x.pt2"}


@pytest.mark.slow
@pytest.mark.parametrize("format", FILE_FORMATS)
def test_a_model_that_needs_a_fixed_batch_size_is_exported_for_one_image(checkpoints, format):
    written = fold_folder(checkpoints / "ByImage", format, trust_code=True)
    assert written.batch == 1
    assert error_of(checkpoints / "ByImage", written, images(1)) < FLOAT32_ERROR


@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_a_file_has_outputs_of_any_structure_and_no_paths_of_this_machine(checkpoints, format):
    written = fold_folder(checkpoints / "Branching", format, trust_code=True)
    assert error_of(checkpoints / "Branching", written, images(2)) < FLOAT32_ERROR
    parts = [Path(written.output).read_bytes()]
    if format == "pt2":
        with zipfile.ZipFile(written.output) as archive:
            parts = [archive.read(member) for member in archive.namelist()]
    else:
        outputs = onnxruntime.InferenceSession(written.output).get_outputs()
        assert [entry.name for entry in outputs] == ["maps.0", "maps.1", "mean.0"]
    for file in (torch.__file__, __file__):
        for folder in Path(file).parents[:2]:
            assert not any(str(folder).encode() in part for part in parts), folder


@pytest.mark.slow
def test_weights_too_large_for_one_file_go_into_a_second(tmp_path, monkeypatch, checkpoints):
    monkeypatch.setattr(dcls_convert.export.program, "MAX_IN_ONE_FILE", 0)
    written = fold_folder(checkpoints / "Plain", "onnx", tmp_path / "x.onnx", trust_code=True)
    assert {path.name for path in tmp_path.iterdir()} == {"x.onnx", "x.onnx.data"}
    assert error_of(checkpoints / "Plain", written, images(2)) < FLOAT32_ERROR
    (tmp_path / "x.onnx").unlink()
    (tmp_path / "x.onnx.data").write_text("of another model")
    fold = ["fold", checkpoints / "Plain", "--trust-code", "--format", "onnx", "-o", "x.onnx"]
    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "export", lambda *_, **__: pytest.fail("must not run"))
        assert "x.onnx.data already exists" in run(*fold, code=2)[1]
    assert "Wrote x.onnx and x.onnx.data, which must stay beside it: " in run(*fold, "--force")[0]
    report = json.loads(run(*fold, "--force", "--json")[0])
    assert (report["output"], report["data_file"]) == ("x.onnx", "x.onnx.data")
    run_onnx("x.onnx", images(2), None)


# --- Failures


def test_whatever_an_exporter_raises_is_one_line(monkeypatch, checkpoints):
    def fail(*_):
        raise RuntimeError("long\nadvice") from KeyError("operator")

    monkeypatch.setattr("torch.export.save", fail)
    with pytest.raises(ModelError, match=r"^the export to pt2 fails: KeyError: 'operator'$"):
        fold_folder(checkpoints / "Plain", "pt2", Path("x.pt2"), trust_code=True)
    assert list(Path().iterdir()) == []


def test_an_export_with_other_outputs_is_not_kept(monkeypatch, checkpoints):
    Path("x.pt2").write_text("old")
    load = torch.export.load

    class Broken:
        def __init__(self, path):
            self.run = load(path).module()

        def module(self):
            return lambda images: 1.01 * self.run(images)

    monkeypatch.setattr(torch.export, "load", Broken)
    with pytest.raises(DclsConvertError, match=r"relative error is \d\.\de-0[23]; at most 1e-04"):
        fold_folder(checkpoints / "Plain", "pt2", Path("x.pt2"), force=True, trust_code=True)
    assert [path.read_text() for path in Path().iterdir()] == ["old"]


def test_folding_that_changes_outputs_is_refused(tmp_path, monkeypatch, checkpoints):
    def fold_wrongly(model):
        count = fold_to_dense_(model)
        model.stage[1].weight.data.mul_(2)
        return count

    monkeypatch.setattr(dcls_convert.export.fold, "fold_to_dense_", fold_wrongly)
    with pytest.raises(DclsConvertError, match="folding: the outputs' relative error is"):
        fold_folder(checkpoints / "Plain", "timm", tmp_path / "out", trust_code=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("in --format onnx --output notes.txt --force", "must end in .onnx"),
        ("in --output in --force", "is the folder itself"),
        ("in --output x.onnx", "add --format onnx, or write a folder"),
        (
            "in --format onnx --output x.onnx",
            "format onnx needs onnxscript: pip install onnxscript",
        ),
        ("nowhere", "nowhere: is not a folder"),
    ],
)
def test_refusals_come_before_any_work(tmp_path, checkpoints, monkeypatch, arguments, message):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    monkeypatch.setattr(dcls_convert.export.fold, "load_state", None)
    (tmp_path / "in").symlink_to(checkpoints / "Plain")
    (tmp_path / "notes.txt").write_text("mine")
    out, err = run("fold", *arguments.split(), code=2)
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert {path.name for path in tmp_path.iterdir()} == {"in", "notes.txt"}


# --- The rows


def test_every_format_has_a_row_and_a_writer_and_declares_its_packages():
    assert get_args(FormatName) == tuple(FORMATS)
    extras = set(importlib.metadata.requires("dcls-convert"))
    for format in FORMATS.values():
        assert callable(pkgutil.resolve_name(format.writer))
        for package in format.packages:
            assert any(re.match(rf"{package}\b.*; extra == .export.", line) for line in extras)


@pytest.fixture
def new_format(monkeypatch):
    """Add the format `two`, whose suffix has two dots."""
    format = Format(file="program of two", suffix=".two.pt2", writer=FORMATS["pt2"].writer)
    monkeypatch.setitem(FORMATS, "two", format)


@pytest.mark.usefixtures("new_format")
def test_a_row_is_all_that_a_format_needs(checkpoints):
    written = fold_folder(checkpoints / "Plain", "two", trust_code=True)
    assert written.output == "Plain.two.pt2"
    assert error_of(checkpoints / "Plain", written, images(1)) < FLOAT32_ERROR
    assert "Wrote Plain.two.pt2: program of two for images of" in _lines(written, FORMATS["two"])[2]
    with pytest.raises(DclsConvertError, match=r"x\.two must end in \.two\.pt2"):
        fold_folder(checkpoints / "Plain", "two", Path("x.two"))


# --- The command


@pytest.mark.parametrize("format", ["timm", "pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_the_command_says_what_it_wrote(checkpoints, format):
    checkpoint = str(checkpoints / "Plain")
    fold = ["fold", checkpoint, "--trust-code", "--format", format]
    out, err = run(*fold, "--json", "--output", f"x{FORMATS[format].suffix}")
    written = json.loads(out)
    assert (written["format"], written["output"]) == (1, f"x{FORMATS[format].suffix}")
    assert (written["layers"], written["input_size"]) == (2, list(IMAGE))
    assert all(line.startswith(f"{checkpoint}: ") for line in err.splitlines())
    out, _ = run(*fold, "--output", f"z{FORMATS[format].suffix}")
    assert f"(relative error {written['relative_error']:.1e})" in out
    assert f"{written['params_before']:,} → {written['params_after']:,}" in out
    snippet = out.partition("\n\n")[2]
    names: dict[str, object] = {}
    exec(textwrap.dedent(snippet), names)
    assert "model" in names or "session" in names


@pytest.mark.processes
def test_onnxruntime_does_not_phone_home(tmp_path, checkpoints):
    """Its telemetry stores an identifier of the machine under HOME."""
    # Without CI and ORT_DISABLE_TELEMETRY, which would stop the telemetry.
    environment = {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    line = ["fold", checkpoints / "convnext", "--format", "onnx", "--output", tmp_path / "a.onnx"]
    subprocess.run(
        [sys.executable, "-c", "from dcls_convert.cli.app import main; main()", *line],
        env=environment,
        check=True,
    )
    assert (tmp_path / "a.onnx").is_file()
    assert not list(tmp_path.rglob("*onnxruntime*"))
