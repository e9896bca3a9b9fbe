"""Running a user's network leaves the settings of the process as they were."""

import sys
import threading
import warnings
from operator import attrgetter

import pytest
import torch

from dcls_convert.running.process_settings import (
    CPU_FP32_BACKENDS,
    CUDA_FP32_BACKENDS,
    full_precision,
    suppress_output,
)

BACKENDS = torch.backends
NEWER = hasattr(BACKENDS.cuda.matmul, "fp32_precision")  # torch 2.9
PARTS = (*CPU_FP32_BACKENDS, *CUDA_FP32_BACKENDS, "cudnn") if NEWER else ()


def precisions():
    """All settings for products of float32; None for those that torch refuses to read."""

    def read_or_none(read):
        try:
            return read()
        except RuntimeError:
            return None

    older = [
        read_or_none(torch.get_float32_matmul_precision),
        read_or_none(lambda: BACKENDS.cuda.matmul.allow_tf32),
        read_or_none(lambda: BACKENDS.cudnn.allow_tf32),
    ]
    return older, [attrgetter(part)(BACKENDS).fp32_precision for part in PARTS]


@pytest.fixture
def _restored_precisions():
    (precision, _, in_cudnn), before = precisions()
    yield
    if NEWER:
        BACKENDS.fp32_precision = "none"
    torch.set_float32_matmul_precision(precision)
    BACKENDS.cudnn.allow_tf32 = in_cudnn
    for part, value in zip(PARTS, before, strict=True):
        attrgetter(part)(BACKENDS).fp32_precision = value
    assert precisions() == ([precision, False, in_cudnn], before)


ALLOWED = {
    "nothing": lambda: None,
    "TF32 in products": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
}
if NEWER:
    ALLOWED["TF32"] = lambda: setattr(BACKENDS, "fp32_precision", "tf32")


@pytest.mark.usefixtures("_restored_precisions")
@pytest.mark.parametrize("allowed", ALLOWED)
def test_float32_is_not_rounded_inside_even_if_the_process_allows_it(allowed):
    ALLOWED[allowed]()
    before = precisions()
    with torch.autocast("cpu"), full_precision():
        assert not torch.is_autocast_enabled("cpu")
        older, parts = precisions()
        assert older[0] in ("highest", None)
        assert not any(older[1:])
        assert not {"tf32", "bf16"} & set(parts[: len(CPU_FP32_BACKENDS) + len(CUDA_FP32_BACKENDS)])
    assert precisions() == before


def settings():
    return (precisions(), sys.stdout, sys.stderr, list(warnings.filters))


@pytest.mark.parametrize("change", [full_precision, suppress_output])
def test_a_thread_waits_until_another_one_has_restored_the_settings(change):
    before = settings()
    seen_by_other = []

    def other():
        with change():
            seen_by_other.append(settings())

    with change():
        inside = settings()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        assert seen_by_other == []
        assert settings() == inside != before
    thread.join()
    assert seen_by_other[0][0] == inside[0]
    assert settings() == before
