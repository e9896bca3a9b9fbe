"""`inspect` gives the statistics of the model's positions, and reports damage in one line."""

import json
import math
from dataclasses import replace

import pytest
import timm
import torch
from timm.models import save_for_hf

from dcls_convert import load_converted
from dcls_convert.errors import CheckpointError
from dcls_convert.layers.position_statistics import (
    border_share,
    mean_distance,
    overlap_share,
    rms_per_axis,
)
from dcls_convert.placing.fold import fold_to_dense_

from ..command_line import run
from ..conftest import TINY
from .folders import convert, edit_tensors, inspect_folder, save, seal


@pytest.mark.parametrize(
    "options", [{"tie": "none"}, {"interpolation": "gaussian", "size": (9, 11)}]
)
def test_rows_have_the_statistics_of_the_model(tmp_path, options):
    model, plan = convert(**options)
    inspection = inspect_folder(save(tmp_path / "out", model, plan, check=False))
    names = [name for row in inspection.positions for name in row.layers]
    assert sorted(names) == sorted(layer.name for layer in plan.layers)
    for row in inspection.positions:
        (positions,) = {model.get_submodule(name).positions for name in row.layers}
        assert row.tied == (len(row.layers) > 1)
        layer = model.get_submodule(row.layers[0])
        assert row.elements == positions[0].numel()
        assert row.border_share == border_share(positions, layer.dilated_kernel_size)
        assert row.overlap_share == overlap_share(positions)
        assert row.spread == rms_per_axis(positions)
        assert row.mean_distance == mean_distance(positions)
        sigma = None if layer.sigma is None else pytest.approx(layer.sigma.mean().item())
        assert row.mean_sigma == sigma
    total = inspection.to_dict()["total"]
    at_border = sum(row.border_share * row.elements for row in inspection.positions)
    elements = sum(row.elements for row in inspection.positions)
    assert total["border_share"] == pytest.approx(at_border / elements)


def test_a_folder_saved_by_timm_is_inspected(folder, tmp_path):
    save_for_hf(load_converted(folder), tmp_path / "tuned", safe_serialization=True)
    assert inspect_folder(tmp_path / "tuned").positions == inspect_folder(folder).positions
    save_for_hf(timm.create_model(TINY), tmp_path / "other", safe_serialization=True)
    with pytest.raises(CheckpointError, match=r"there is no plan in config\.json"):
        inspect_folder(tmp_path / "other")


POSITIONS = "stages.2.blocks.0.conv_dw.positions"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(POSITIONS), f"{POSITIONS} is missing; dcls-convert verify lists all"),
        (
            lambda t: t[POSITIONS].fill_(torch.nan),
            "values that are NaN or infinite; dcls-convert verify lists all problems",
        ),
        (
            lambda t: t.update({POSITIONS: t[POSITIONS][:1].clone()}),
            r"has shape \(1, 48, 1, \d+\), the plan has \(2, 48, 1, \d+\)",
        ),
    ],
)
def test_damage_is_reported_in_one_line(folder, edit, message):
    edit_tensors(folder, edit)
    seal(folder)
    with pytest.raises(CheckpointError, match=message):
        inspect_folder(folder)


def test_the_command_has_a_row_for_every_tensor_in_text_and_json(folders, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = folders / "gauss"
    inspection = inspect_folder(folder)
    out, _ = run("inspect", folder)
    assert max(len(line) for line in out.splitlines() if str(folder) not in line) <= 80
    for row in inspection.positions[1:]:
        (line,) = [line for line in out.splitlines() if line.startswith(f"{row.name} ")]
        shares = f"{100 * row.border_share:.1f} % {100 * row.overlap_share:.1f} %"
        lengths = (*row.spread, row.mean_distance, row.mean_sigma)
        numbers = " ".join(f"{length:.2f}" for length in lengths)
        expected = f"{row.name} {len(row.layers)} {row.kernel_count} in 9x9 {shares} {numbers}"
        assert " ".join(line.split()) == expected
    assert f"{inspection.elements:,} distinct elements" in out
    out, _ = run("inspect", folder, "--json")
    assert json.loads(out) == json.loads(inspection.to_json())


def test_the_folder_of_a_folded_model_has_no_positions(converted, tmp_path):
    model, plan = converted
    fold_to_dense_(model)
    plan = replace(plan, folded=True)
    folder = save(tmp_path / "folded", model, plan)
    line = f"error: {folder}: is folded into plain convolutions, which have no positions\n"
    out, err = run("inspect", folder, code=2)
    assert out == ""
    assert err.endswith(line)


def test_the_distance_from_the_start_is_that_of_each_element(converted, folders, tmp_path):
    model, plan = converted
    rows = {row.name: row for row in inspect_folder(folders / "good").positions}
    positions = model.stages[2].blocks[0].conv_dw.positions
    with torch.no_grad():
        positions.clamp_(-1, 1)  # so that no element leaves the window
        start = save(tmp_path / "start", model, plan, check=False)
        positions[:, 0, 0, 0] += torch.tensor([3.0, -0.25])
        positions[:, 1, 0, 0] += torch.tensor([0.0, 1.0])
    tuned = save(tmp_path / "tuned", model, plan, check=False)
    data = json.loads(run("inspect", tuned, "--since", start, "--json")[0])
    moves = {row["name"]: (row["mean_move"], row["largest_move"]) for row in data["positions"]}
    largest = pytest.approx(math.hypot(3, 0.25))
    mean = pytest.approx((math.hypot(3, 0.25) + 1) / rows["stages.2"].elements)
    assert moves.pop("stages.2") == (mean, largest)
    assert set(moves.values()) == {(0, 0)}
    assert "in cells; the largest is 3.01." in run("inspect", tuned, "--since", start)[0]
    other = save(tmp_path / "other", *convert(kernel_count=5), check=False)
    _, err = run("inspect", tuned, "--since", other, code=2)
    assert "not the start of this checkpoint's training: " in err
