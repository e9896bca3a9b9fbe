"""The GPU check, run on a CPU: it finds errors and slow algorithms, and stores its results."""

import os
from pathlib import Path

import pytest
import torch

from dcls_convert.compare import gpu_accuracy, gpu_check
from dcls_convert.compare.gpu_accuracy import forced_algorithm, largest_error
from dcls_convert.compare.gpu_check import GpuCheck
from dcls_convert.compare.gpu_report import GpuReport, GpuRow, verdict
from dcls_convert.conversion.loaded import LoadedNetwork
from dcls_convert.conversion.request import ConversionRequest
from dcls_convert.depthwise import matmul
from dcls_convert.depthwise.choice import VARIABLE
from dcls_convert.options import PlanOptions
from dcls_convert.views.gpu import measurement_line

from ..command_line import NET, net, run
from ..recorded_calls import recording

CPU = torch.device("cpu")
COMMAND = ("gpu", NET, "--input-size", "3x16x16", "--dilated-size", 9)


@pytest.fixture(autouse=True)
def _small(monkeypatch, tmp_path):
    """Run without the large map and without compilers."""
    monkeypatch.setattr(gpu_accuracy, "ACCURACY_MAPS", gpu_accuracy.ACCURACY_MAPS[:1])
    monkeypatch.setattr(gpu_check, "ROUNDS", 1)
    monkeypatch.setattr(gpu_check, "ROUND_MS", 0.0)
    monkeypatch.setattr(GpuCheck, "_compiled_cases", lambda self: [])
    monkeypatch.chdir(tmp_path)


def make_check(model):
    options = PlanOptions(dilated_size=9)
    request = ConversionRequest(model=model, options=options, input_size=(3, 16, 16))
    return GpuCheck(LoadedNetwork(request), CPU, seconds=60)


def timed(way, ms, work="training", batch=64):
    return GpuRow(part="network", what="converted", way=way, work=work, batch=batch, ms=ms)


def test_the_command_prints_and_stores_every_row_and_the_verdict():
    out, err = run(*COMMAND, "--device", "cpu")
    report = GpuReport.from_json(Path("dcls-convert-gpu.json").read_bytes(), "here")
    lines = out.splitlines()
    assert lines[1 : 1 + len(report.rows)] == [
        measurement_line(row).rstrip() for row in report.rows
    ]
    assert lines[-1] == report.verdict
    assert report.choices
    assert "wrote dcls-convert-gpu.json" in err
    assert all(row.problem is None for row in report.rows)
    kinds = {(row.part, row.what.split(",")[0], row.way, row.work) for row in report.rows}
    for work in ("inference", "training"):
        for way in ("auto", "torch", "matmul"):
            assert ("network", "converted", way, work) in kinds
        for way in ("torch", "matmul"):
            assert {("layer", f"8 channels of {side}x{side}", way, work) for side in (8, 4)} < kinds
    assert "already exists" in run(*COMMAND, "--device", "cpu", code=2)[1]


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out, err = run(*COMMAND, code=2)
    assert not out
    assert "error: torch finds no GPU here" in err.splitlines()[-1]
    assert not list(Path().iterdir())


def test_rows_measured_before_an_interrupt_are_stored(monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(GpuCheck, "_network_cases", interrupt)
    run(*COMMAND, "--device", "cpu", code=130)
    report = GpuReport.from_json(Path("dcls-convert-gpu.json").read_bytes(), "here")
    assert [row.part for row in report.rows] == ["proof"] * 3


def test_after_the_time_limit_no_timing_is_started():
    check = make_check(net())
    check.end = 0.0
    rows = list(check.measure())
    assert {row.part for row in rows} == {"proof"}
    assert check.report().not_begun > 0


def test_with_enough_time_everything_is_timed():
    check = make_check(net())
    rows = list(check.measure())
    assert {row.part for row in rows} == {"proof", "network", "layer"}
    assert check.report().not_begun == 0


@pytest.mark.parametrize("dtype", gpu_accuracy.MAX_ERROR, ids=str)
def test_products_are_accurate_and_wrong_ones_are_found(dtype, monkeypatch):
    with forced_algorithm("matmul"):
        assert largest_error(8, 13, dtype, CPU) < gpu_accuracy.MAX_ERROR[dtype]
    product = torch.bmm

    def drop_the_last_column(a, b):
        result = product(a, b)
        result[..., -1] = 0
        return result

    monkeypatch.setattr(torch, "bmm", drop_the_last_column)
    problems = [row.problem for row in gpu_accuracy.accuracy_rows(CPU)]
    assert all(problem.startswith("wrong: ") for problem in problems)


@pytest.mark.parametrize("dtype", gpu_accuracy.MAX_ERROR, ids=str)
def test_channels_of_the_last_map_are_processed_in_parts(dtype, monkeypatch):
    monkeypatch.undo()
    channels, side = gpu_accuracy.ACCURACY_MAPS[-1]
    calls = []
    monkeypatch.setattr(torch, "bmm", recording(torch.bmm, calls))
    options = {"dtype": dtype, "device": "meta"}
    maps = torch.empty(gpu_accuracy.ACCURACY_IMAGES, channels, side, side, **options)
    window = gpu_accuracy.ACCURACY_WINDOW
    kernel = torch.empty(channels, 1, window, window, **options)
    matmul.convolve(maps, kernel, (8, 8))
    assert len(calls) > 1


def test_exhausted_memory_is_a_row_and_halves_the_batch(monkeypatch):
    check = make_check(net())
    case = check._network_cases()[0]

    def refuse(model, inputs):
        if len(inputs[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    check.original.register_forward_pre_hook(refuse)
    rows = list(check._timed_rows(case, 8))
    assert [(row.batch, row.problem) for row in rows] == [
        (8, "out of memory"),
        (4, "out of memory"),
        (2, None),
    ]


def test_a_failure_is_a_row_with_its_reason(monkeypatch):
    check = make_check(net())

    def fail(model, inputs):
        raise RuntimeError("no kernel\nfor this device")

    check.folded.register_forward_pre_hook(fail)
    failed = [row for row in check.measure() if row.problem is not None]
    assert {(row.what, row.problem) for row in failed} == {
        ("folded", "RuntimeError: no kernel for this device")
    }


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        (
            [timed("auto", 1.05), timed("torch", 1.0), timed("matmul", 3.0)],
            "nothing to do",
        ),
        (
            [timed("auto", 2.0), timed("torch", 1.0), timed("matmul", 3.0)],
            f"export {VARIABLE} as torch for training at batch 64 (2.0 x as fast)",
        ),
        (  # rows with another batch or another work are not compared
            [
                timed("auto", 2.0),
                timed("torch", 1.0, batch=1),
                timed("torch", 1.0, "inference"),
            ],
            "nothing to do",
        ),
        ([timed("torch", 1.0)], "no converted network was timed"),
        (
            [GpuRow(part="proof", what="a map", batch=2, problem="wrong"), timed("auto", 1.0)],
            f"matrix products are wrong or fail here; export {VARIABLE}=torch",
        ),
    ],
)
def test_the_verdict_names_algorithms_that_are_faster_than_the_packages_choice(rows, advice):
    assert verdict(rows).startswith(advice)


@pytest.mark.parametrize("before", [None, "torch"])
def test_the_environment_variable_is_restored(before, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    with forced_algorithm("matmul"):
        assert os.environ[VARIABLE] == "matmul"
    assert os.environ.get(VARIABLE) == before
