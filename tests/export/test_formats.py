"""What `dcls-convert fold` writes gives the outputs of the checkpoint it was made from, or is not written at all."""

import json
import math
import os
import resource
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch.utils._pytree import tree_leaves

import dcls_convert.export
from dcls_convert import fold_to_dense_, load_converted
from dcls_convert.errors import DclsConvertError
from dcls_convert.export.formats import FORMATS, fold_checkpoint
from dcls_convert.export.job import BATCHES
from dcls_convert.networks.outputs import relative_error
from dcls_convert.networks.running import quietly
from dcls_convert.options import FOLD_FORMATS

from ..cli.test_bad_input import refused, snapshot
from ..command_line import run
from ..forks import forked
from ..surgery.test_fold import FLOAT32_ERROR, IMAGE
from .networks import Plain, checkpoint_of

EXPORTS = ("onnx", "pt2")


def loaded_outputs(checkpoint, images):
    with torch.no_grad():
        return load_converted(checkpoint, trust_code=True)(images)


def error_of(checkpoint, found, batch=2):
    """Of the outputs of what was written, for images of a new batch."""
    images = torch.randn(batch, *IMAGE)
    wanted = loaded_outputs(checkpoint, images)
    if found.format == "onnx":  # knows no structure
        session = onnxruntime.InferenceSession(found.output, providers=["CPUExecutionProvider"])
        given = session.run(None, {session.get_inputs()[0].name: images.numpy()})
        wanted = [leaf for leaf in tree_leaves(wanted) if isinstance(leaf, torch.Tensor)]
        return relative_error(wanted, list(map(torch.from_numpy, given)))
    if found.format == "pt2":
        with torch.no_grad():
            return relative_error(wanted, torch.export.load(found.output).module()(images))
    return relative_error(wanted, loaded_outputs(found.output, images))


@pytest.mark.parametrize("format", EXPORTS)
def test_exported_files_give_the_same_for_any_number_of_images(checkpoints, format):
    found = fold_checkpoint(checkpoints / "convnext", format)
    assert (found.kind, found.output, found.batch) == (format, f"convnext.{format}", None)
    assert [path.name for path in Path().iterdir()] == [f"convnext.{format}"]
    for batch in (1, 2, *BATCHES, 5):
        assert error_of(checkpoints / "convnext", found, batch) < FLOAT32_ERROR


@pytest.mark.parametrize("format", EXPORTS)
def test_a_folded_checkpoint_can_be_exported_but_not_folded_again(tmp_path, checkpoints, format):
    fold_checkpoint(checkpoints / "Plain", "timm", tmp_path / "once", trust_code=True)
    with pytest.raises(DclsConvertError, match=r"is folded already, and .*:Plain is not of timm's registry"):
        fold_checkpoint(tmp_path / "once", "timm", tmp_path / "twice", trust_code=True)
    found = fold_checkpoint(tmp_path / "once", format, tmp_path / f"x.{format}", trust_code=True)
    assert found.params_before == found.params_after
    assert error_of(checkpoints / "Plain", found) < FLOAT32_ERROR
    assert {path.name for path in tmp_path.iterdir()} == {"once", f"x.{format}"}


@pytest.mark.parametrize("format", EXPORTS)
def test_a_model_for_one_number_of_images_is_exported_for_one(checkpoints, format):
    found = fold_checkpoint(checkpoints / "ByImage", format, trust_code=True)
    assert found.batch == 1
    assert found.note.startswith(f"the export to {format} ")  # fails, or with torch 2.8 gives what does not run
    assert not {"\x1b", "\n"} & set(found.note)
    assert error_of(checkpoints / "ByImage", found, batch=1) < FLOAT32_ERROR
    assert [path.name for path in Path().iterdir()] == [found.output]


def test_what_a_failed_export_wrote_is_gone(monkeypatch, checkpoints):
    export = torch.onnx.export

    def for_one_image(model, args, path, *, dynamic_shapes, **options):
        if dynamic_shapes is not None:
            path.with_name("x.onnx.data").write_text("left over")
            raise RuntimeError("not for any number")
        export(model, args, path, dynamic_shapes=None, **options)

    monkeypatch.setattr("torch.onnx.export", for_one_image)
    found = fold_checkpoint(checkpoints / "Plain", "onnx", Path("x.onnx"), trust_code=True)
    assert (found.batch, found.note) == (1, "the export to onnx fails: RuntimeError: not for any number")
    assert [path.name for path in Path().iterdir()] == ["x.onnx"]


@pytest.mark.parametrize("format", FOLD_FORMATS)
def test_outputs_of_any_structure(checkpoints, format):
    found = fold_checkpoint(checkpoints / "Several", format, trust_code=True)
    assert (found.kind, found.batch) == ("dcls" if format == "timm" else format, None)
    assert error_of(checkpoints / "Several", found) < FLOAT32_ERROR


@pytest.mark.parametrize("limit", [0, 10**9])
def test_weights_go_into_a_second_file_only_where_one_is_too_small(tmp_path, monkeypatch, checkpoints, limit):
    monkeypatch.setattr(dcls_convert.export.onnx, "MOST_IN_ONE_FILE", limit)
    found = fold_checkpoint(checkpoints / "Plain", "onnx", tmp_path / "x.onnx", trust_code=True)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == ({"x.onnx", "x.onnx.data"} if limit == 0 else {"x.onnx"})
    assert error_of(checkpoints / "Plain", found) < FLOAT32_ERROR


# What goes wrong.


def broken(monkeypatch, how):
    """Make the exported program another one than the model."""
    run_export = dcls_convert.export.job._export

    def export(job, path, bound, export, batches):
        def and_then(path, images, dynamic):
            exported = export(path, images, dynamic)
            return lambda images: torch.utils._pytree.tree_map(how, exported(images))

        return run_export(job, path, bound, and_then, batches)

    monkeypatch.setattr(dcls_convert.export.job, "_export", export)


@pytest.mark.parametrize("format", EXPORTS)
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (lambda y: y * 1.01, r"relative error is \d\.\de-0[23], allowed is 1e-0[34]"),
        (lambda y: y * math.nan, "not finite"),
        (lambda y: y[:, :-1], "has shape"),
    ],
)
def test_an_export_with_other_outputs_is_not_kept(tmp_path, monkeypatch, checkpoints, format, how, says):
    (tmp_path / f"x.{format}").write_text("old")
    before = snapshot(tmp_path)
    broken(monkeypatch, how)
    with pytest.raises(DclsConvertError, match=says):
        fold_checkpoint(checkpoints / "Plain", format, tmp_path / f"x.{format}", force=True, trust_code=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("no")])
@pytest.mark.parametrize(
    ("format", "name", "culprit"),
    [
        ("timm", "convnext", "dcls_convert.export.stock_timm.timm_config"),
        ("timm", "Plain", "dcls_convert.checkpoints.save.timm_config"),
        ("onnx", "Plain", "torch.onnx.export"),
        ("pt2", "Plain", "torch.export.save"),
    ],
)
def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch, checkpoints, format, name, culprit, error):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(culprit, fail)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else (DclsConvertError, RuntimeError)
    with pytest.raises(expected):
        fold_checkpoint(checkpoints / name, format, tmp_path / "new" / f"x.{format}", trust_code=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", EXPORTS)
def test_a_full_disk_is_an_error_like_others(tmp_path, checkpoints, format):
    """In a process of its own, which torch's writer of .pt2 files would end."""
    (tmp_path / f"x.{format}").write_text("old")

    def fold():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        fold_checkpoint(checkpoints / "Plain", format, tmp_path / f"x.{format}", force=True, trust_code=True)

    with pytest.raises(AssertionError, match="File too large; the one that is there is whole"):
        forked(fold)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


class Overflowing(Plain):
    def forward(self, x):
        return self.stage(x) / 0


def test_a_model_that_gives_nan_is_refused(tmp_path):
    checkpoint_of(Overflowing, tmp_path / "in")
    for format in FOLD_FORMATS:
        with pytest.raises(DclsConvertError, match="not finite"):
            fold_checkpoint(tmp_path / "in", format, tmp_path / f"x.{format}", trust_code=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_table_has_every_format_of_the_options():
    assert tuple(FORMATS) == FOLD_FORMATS


def test_folding_that_changes_outputs_is_refused(tmp_path, monkeypatch, checkpoints):
    def fold_wrongly(model):
        count = fold_to_dense_(model)
        model.stage[1].weight.data.mul_(2)
        return count

    monkeypatch.setattr(dcls_convert.export.formats, "fold_to_dense_", fold_wrongly)
    with pytest.raises(DclsConvertError, match="folding: the outputs' relative error is"):
        fold_checkpoint(checkpoints / "Plain", "timm", tmp_path / "out", trust_code=True)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def here(tmp_path, checkpoints):
    """A checkpoint `in`, and what is in the way."""
    (tmp_path / "in").symlink_to(checkpoints / "Plain")
    (tmp_path / "x.onnx").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder.onnx").mkdir()
    (tmp_path / "link.onnx").symlink_to("x.onnx")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("in --format onnx --output x.onnx", "already exists; --force replaces it"),
        ("in --format onnx --output folder.onnx --force", "is not a file, so it is left"),
        ("in --format onnx --output link.onnx --force", "is a link, so it is left"),
        ("in --format onnx --output notes.txt --force", "must end in .onnx"),
        ("in --format pt2 --output x.onnx --force", "must end in .pt2"),
        ("in --format onnx --output notes.txt/x.onnx", "notes.txt is not a folder"),
        ("in --output full", "already exists"),
        ("in --output full --force", "holds 'notes.txt'"),
        ("in --output in --force", "is the checkpoint itself"),
        ("full", "full/config.json: cannot be read"),
        ("nowhere", "nowhere: is not a folder"),
        ("notes.txt --format pt2", "notes.txt: is not a folder"),
    ],
)
def test_refusals(here, arguments, says):
    refused("fold", *arguments.split(), says=[says])


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_before_any_work(here, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(dcls_convert.export.formats, "load_converted", None)
    says = f"--format onnx needs {missing}: pip install 'dcls-convert[export]'"
    refused("fold", "in", "--format", "onnx", says=[says])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("format", FOLD_FORMATS)
def test_a_damaged_checkpoint_is_refused(checkpoints, tmp_path, file, format):
    folder = tmp_path / "in"
    folder.mkdir()
    for path in (checkpoints / "Plain").iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[:-99] if path.name == file else content)
    refused("fold", "in", "--trust-code", "--format", format, says=[f"in/{file}: "])


# The command.


def test_quietly_keeps_all_but_errors_away(capfd):
    @quietly()
    def noisy():
        print("said")
        print("said", file=sys.stderr)
        warnings.warn("said", stacklevel=1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        noisy()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("format", FOLD_FORMATS)
def test_the_command_says_what_it_wrote(checkpoints, format):
    checkpoint = str(checkpoints / "Plain")
    fold = ["fold", checkpoint, "--trust-code", "--format", format]
    out, err = run(*fold, "--json", "--output", f"x.{format}")
    found = json.loads(out)
    assert found["format"] == format
    assert found["output"] == f"x.{format}"
    assert found["relative_error"] < FLOAT32_ERROR
    assert (found["layers"], found["input_size"]) == (2, list(IMAGE))
    assert all(line.startswith(f"{checkpoint}: ") for line in err.splitlines())
    assert run(*fold, "--quiet", "--output", f"y.{format}") == (f"y.{format}\n", "")
    out, _ = run(*fold, "--output", f"z.{format}")
    assert f"{found['relative_error']:.1e}" in out
    assert f"{found['params_before']:,} → {found['params_after']:,}" in out
    snippet = out.partition("\n\n")[2]
    names: dict[str, object] = {}
    exec(textwrap.dedent(snippet), names)
    assert "model" in names or "session" in names


@pytest.mark.processes
def test_onnxruntime_does_not_phone_home(tmp_path, checkpoints):
    """Its telemetry keeps a number of the machine under HOME, and says so where it cannot."""
    unset = ("CI", "XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY")  # the first and the last stop it, too
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    line = ["fold", checkpoints / "convnext", "--format", "onnx", "--output", tmp_path / "a.onnx"]
    (tmp_path / "home").mkdir()
    subprocess.run(
        [sys.executable, "-c", "from dcls_convert.cli.app import main; main()", *line],
        env=environment | {"HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=True,
    )
    assert (tmp_path / "a.onnx").is_file()
    assert not list((tmp_path / "home").rglob("*onnxruntime*"))
