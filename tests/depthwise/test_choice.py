"""Which way a convolution goes: by rule, by the environment, or by what was timed at first sight; and it stays so."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dcls_convert.depthwise import choice, choices, matmul, onednn
from dcls_convert.depthwise.choice import VARIABLE, conv2d, depthwise_way
from dcls_convert.errors import DclsConvertError

from .gpu_forms import Watch

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
CASE = {
    "device": CUDA,
    "dtype": torch.bfloat16,
    "channels_last": False,
    "input_size": (128, 96, 56, 56),
}
GEOMETRY = {
    "kernel_size": (96, 1, 17, 17),
    "stride": (1, 1),
    "padding": (8, 8),
    "dilation": (1, 1),
    "groups": 96,
}


def way(**changes):
    return depthwise_way(**{**CASE, **GEOMETRY, **changes})


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(onednn, "most_columns", lambda: 6)
    monkeypatch.setattr(choice, "chosen", {})


@pytest.mark.parametrize("device", ["cuda", "mps", "xpu"])
def test_the_rule_on_gpus(device):
    on_gpu = {"device": torch.device(device)}
    assert (
        way(**on_gpu)
        == way(**on_gpu, padding="same")
        == way(**on_gpu, dtype=torch.float64)
        == "matmul"
    )
    assert way(**on_gpu, kernel_size=(96, 1, 9, 9), padding=(4, 4)) == "matmul"
    assert way(**on_gpu, kernel_size=(96, 1, 9, 7), padding=(4, 3)) == "torch"


def test_the_environment_overrules_where_products_can(monkeypatch):
    assert way(device=CPU, dtype=torch.float32) == "onednn"
    monkeypatch.setenv(VARIABLE, "torch")
    assert way() == way(device=CPU) == "torch"
    monkeypatch.setenv(VARIABLE, "matmul")
    small = {"input_size": (1, 96, 3, 4), "kernel_size": (96, 1, 2, 3), "padding": (1, 1)}
    assert way(**small) == way(device=CPU) == "matmul"
    assert way(device=CPU, stride=(2, 1)) == "onednn"
    monkeypatch.setenv(VARIABLE, "cudnn")
    with pytest.raises(DclsConvertError, match=f"{VARIABLE}='cudnn' must be auto, torch or matmul"):
        conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3), None, (1, 1), (1, 1), (1, 1), 1)


@pytest.mark.parametrize(
    ("changes", "on_cpu"),
    [
        ({"stride": (2, 1)}, "onednn"),
        ({"kernel_size": (192, 1, 17, 17)}, "onednn"),
        ({"kernel_size": (96, 1, 53, 17), "padding": (26, 8)}, "onednn"),
        ({"padding": (0, 0), "input_size": (128, 96, 16, 56)}, "onednn"),  # whose error is torch's
        ({"dilation": (1, 2)}, "torch"),
        ({"kernel_size": (96, 1, 16, 16), "padding": "same"}, "torch"),
        (
            {"padding": (9, 8), "input_size": (128, 96, 0, 56)},
            "torch",
        ),  # padding alone is enough for the window
        ({"input_size": (0, 96, 56, 56)}, "torch"),
        ({"dtype": torch.int32}, "torch"),
        ({"dtype": None}, "torch"),
        ({"device": torch.device("meta")}, "torch"),
    ],
)
def test_what_products_cannot_goes_another_way(monkeypatch, changes, on_cpu):
    monkeypatch.setenv(VARIABLE, "matmul")
    assert way() == "matmul"
    assert way(**changes) == "torch"
    assert way(**{"device": CPU, "dtype": torch.float32, **changes}) == on_cpu


# At first sight. The CPU stands in for a GPU.


@pytest.fixture
def clock(monkeypatch):
    """Sets the milliseconds that each way takes; `taken` has an entry for each look at the clock."""
    monkeypatch.setattr(choice, "GPUS", frozenset({"cpu"}))

    def set_times(matmul, torch):
        times = itertools.accumulate(
            itertools.cycle([0, 1e-3 * matmul, 0, 1e-3 * torch])
        )  # a begin, an end, and so on
        monkeypatch.setattr(
            choice, "_now", lambda device: set_times.taken.append(device) or next(times)
        )

    set_times.taken = []
    set_times(1.0, 2.0)
    with torch.backends.cudnn.flags(benchmark=True):
        yield set_times


MAPS, KERNEL = torch.ones(2, 3, 9, 9), torch.ones(3, 1, 9, 9)


def convolve(maps=MAPS, kernel=KERNEL):
    return conv2d(maps, kernel, None, (1, 1), (4, 4), (1, 1), 3)


@pytest.mark.parametrize(
    ("torchs", "taken"), [(2.0, "matmul"), (1.16, "matmul"), (1.14, "torch"), (0.5, "torch")]
)
def test_the_faster_way_is_taken_if_it_wins_by_15_percent_and_for_good(clock, torchs, taken):
    clock(1.0, torchs)
    convolve()
    (made,) = choices()
    assert (made.way, made.milliseconds) == (taken, pytest.approx({"matmul": 1.0, "torch": torchs}))
    assert f"float32, batch from 2: {taken} (matmul 1 ms, torch {torchs:.3g} ms)" in str(made)
    clock(torchs, 1.0)
    convolve(torch.ones(3, 3, 9, 9))  # the same power of two
    assert choices() == (made,)


def test_each_case_is_timed_once(clock):
    last = {"memory_format": torch.channels_last}
    others = [
        MAPS,
        MAPS[:1],
        torch.ones(4, 3, 9, 9),
        torch.ones(2, 3, 9, 10),
        MAPS.to(**last),
        MAPS.double(),
    ]
    for _ in range(2):
        for maps in others:
            convolve(maps, KERNEL.to(maps.dtype))
    assert len(choices()) == len(others)
    assert len(clock.taken) == 2 * 2 * (choice.ROUNDS + 1) * len(others)


def watched():
    with Watch(refused=set()):
        convolve()


def compiled():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_compiling", "is_dynamo_compiling"):
            patch.setattr(torch.compiler, name, lambda: True)
        convolve()


@pytest.mark.parametrize(
    ("state", "run", "by_rule"),
    [
        ({"benchmark": False}, convolve, ["matmul"]),
        ({"deterministic": True}, convolve, ["matmul"]),
        ({}, watched, ["matmul"]),
        ({}, compiled, []),
    ],
)
def test_nothing_is_timed(clock, monkeypatch, state, run, by_rule):
    monkeypatch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: "deterministic" in state
    )
    torch.backends.cudnn.benchmark = state.get("benchmark", True)
    run()
    assert not clock.taken
    assert [made.way for made in choices()] == by_rule


@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch, capturing):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(choice, "_time", lambda case, *tensors: {"matmul": 2.0, "torch": 1.0})
    with torch.backends.cudnn.flags(benchmark=True):
        assert way(tensors=(MAPS, KERNEL)) == ("matmul" if capturing else "torch")


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_is_computed_again_goes_the_same_way(clock, monkeypatch, reentrant):
    """Timing at first sight is inside the checkpointed block, whose saved tensors torch counts."""
    gone, product = [], matmul.depthwise
    monkeypatch.setattr(matmul, "depthwise", lambda *given: gone.append(given) or product(*given))
    clock(1.0, 2.0)
    maps, kernel = (tensor.clone().requires_grad_() for tensor in (MAPS, KERNEL))
    output = checkpoint(convolve, maps, kernel, use_reentrant=reentrant)
    clock(2.0, 1.0)
    output.sum().backward()
    assert len(gone) == 2
    expected = torch.autograd.grad(
        torch.nn.functional.conv2d(maps, kernel, padding=4, groups=3).sum(), (maps, kernel)
    )
    torch.testing.assert_close((maps.grad, kernel.grad), expected)
