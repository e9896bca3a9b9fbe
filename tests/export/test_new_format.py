"""Adding a format takes one module and one row of the table; the command and checks follow."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from dcls_convert.cli.typer_classes import Command
from dcls_convert.errors import DclsConvertError
from dcls_convert.export.export_file import export_file
from dcls_convert.export.fold import fold_checkpoint
from dcls_convert.export.formats import EXPORT_FORMATS, ExportFormat

FACTOR = 1.0  # by which the outputs of the written model are multiplied


def write_toy(folded):
    def export(path, images, any_batch):
        torch.save(folded.model.state_dict(), path)
        return lambda images: (FACTOR * folded.model(images),)

    return export_file(folded, 1e-4, export, 'state = torch.load("{folder}")\n')


@pytest.fixture(autouse=True)
def _toy(monkeypatch):
    row = ExportFormat(
        writer=f"{__name__}:write_toy",
        suffix=".toy",
        noun="toy",
        help="a file to play with",
        packages=("torch",),
        flat_outputs=True,
    )
    monkeypatch.setitem(EXPORT_FORMATS, "toy", row)


def fold(*arguments):
    """Run the command after importing it anew, since its options list the formats."""
    spec = importlib.util.find_spec("dcls_convert.cli.fold")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = typer.Typer()
    app.command(cls=Command)(module.fold)
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_lists_and_accepts_a_new_format(checkpoints):
    help = " ".join(fold("--help").replace("│", " ").split())
    choices = "|".join(EXPORT_FORMATS)
    assert choices in help or f"One of {', '.join(EXPORT_FORMATS)}." in help
    assert "toy: a file to play with." in help
    assert "./CHECKPOINT.toy" in help
    out = fold(checkpoints / "Plain", "--trust-code", "--format", "toy", "--json")
    assert json.loads(out)["kind"] == "toy"
    out = fold(checkpoints / "Plain", "--trust-code", "--format", "toy", "--output", "x.toy")
    assert "Wrote x.toy: toy for images of 3x32x32, any number at a time." in out
    assert 'torch.load("x.toy")' in out


def test_a_new_format_is_checked_like_the_others(checkpoints, monkeypatch):
    with pytest.raises(DclsConvertError, match=r"output x must end in \.toy"):
        fold_checkpoint(checkpoints / "convnext", "toy", Path("x"))
    with pytest.raises(DclsConvertError, match="not for toy"):
        fold_checkpoint(checkpoints / "convnext", "toy", opset=17)
    monkeypatch.setattr(f"{__name__}.FACTOR", 1.01)
    with pytest.raises(DclsConvertError, match="the export to toy: the outputs' relative error is"):
        fold_checkpoint(checkpoints / "convnext", "toy")
    assert list(Path().iterdir()) == []
