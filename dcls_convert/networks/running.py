"""Run or change a network that belongs to somebody else, and leave it and the process as they were."""

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

AUTOCASTING = ("cpu", "cuda", "xpu", "mps")  # the types of device for which torch has autocast
CPU_PRODUCTS = (
    "mkldnn.matmul",
    "mkldnn.conv",
)  # what has an `fp32_precision` of its own in torch.backends
CUDA_PRODUCTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")

Part = TypeVar("Part")
Result = TypeVar("Result")
_POOL: ContextVar[ThreadPoolExecutor | None] = ContextVar("pool", default=None)  # of `in_parallel`


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module is in eval mode and nothing is recorded for gradients; afterwards each has its own mode."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False  # `eval` may be the model's own
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, what is float32 is computed in float32: no autocast, and no products in TF32 or bfloat16."""
    backends: Any = torch.backends
    with contextlib.ExitStack() as back:
        for device in AUTOCASTING:
            if torch.is_autocast_enabled(device):
                back.enter_context(torch.autocast(device, enabled=False))
        parts = CPU_PRODUCTS if hasattr(backends.mkldnn, "matmul") else ()
        # Whether torch's newer interface, of 2.9, is in use. Both together make torch.compile fail; and what the older
        # one turns off would inherit from the newer.
        newer = any(
            getattr(part, "fp32_precision", "none") != "none" for part in (backends, backends.cudnn)
        )
        try:
            precision, in_cudnn = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
        except RuntimeError:
            newer = True
        if newer:
            parts, precision, in_cudnn = (*parts, *CUDA_PRODUCTS), "highest", False
        for part in (attrgetter(name)(backends) for name in parts):
            back.callback(setattr, part, "fp32_precision", part.fp32_precision)
            part.fp32_precision = "ieee"
        if precision != "highest":
            back.callback(
                torch.set_float32_matmul_precision, precision
            )  # and the CPU's, which go back after it
            torch.set_float32_matmul_precision("highest")
        if in_cudnn:
            back.callback(setattr, backends.cudnn, "allow_tf32", True)
            backends.cudnn.allow_tf32 = False
        yield


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    """Inside, float32 has full precision and torch one thread: sums do not depend on the number of threads."""
    threads, pool = torch.get_num_threads(), _POOL.get()
    with contextlib.ExitStack() as back:
        back.enter_context(full_precision())
        back.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        if pool is None and threads > 1:
            pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
            back.enter_context(pool)
            back.callback(_POOL.reset, _POOL.set(pool))
        yield


def in_parallel(
    work: Callable[[Part], Result], parts: Sequence[Part], device: torch.device
) -> list[Result]:
    """`work` of each part, in their order, without gradients; on the CPU, in several threads inside `reproducible`."""
    pool, inference = _POOL.get(), torch.is_inference_mode_enabled()

    def alone(part: Part) -> Result:
        with torch.inference_mode(inference), torch.no_grad():
            return work(part)

    if pool is None or device.type != "cpu" or len(parts) < 2:
        return list(map(alone, parts))
    return list(pool.map(alone, parts))


def run(model: nn.Module, batch: Tensor) -> Any:
    """The outputs for a batch, on the model's device and in its dtype."""
    example = next((tensor for tensor in model.parameters() if tensor.is_floating_point()), batch)
    return model(batch.to(example.device, example.dtype))


@contextlib.contextmanager
def unchanged_on_failure(model: nn.Module, *, values: Sequence[Tensor] = ()) -> Iterator[None]:
    """If the block fails, every module has its parameters, children, attributes and the `values` of before."""
    # The registries (parameters, children, hooks) are refilled: they stay the same objects.
    before = [
        (
            vars(module),
            dict(vars(module)),
            [(own, dict(own)) for own in vars(module).values() if isinstance(own, dict)],
        )
        for module in model.modules()
    ]
    copies = [tensor.detach().clone() for tensor in values]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, copy in zip(values, copies, strict=True):
                tensor.copy_(copy)
        for now, attributes, registries in before:
            for own, contents in [(now, attributes), *registries]:
                own.clear()
                own.update(contents)
        raise


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """No warnings and nothing printed from inside the block. Errors go through."""
    with (
        warnings.catch_warnings(action="ignore"),
        contextlib.redirect_stdout(io.StringIO()) as unread,
    ):
        with contextlib.redirect_stderr(unread):
            yield


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Inside, torch's generators start at `seed`; they get their old states back. None leaves them alone."""
    in_use: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices=devices, enabled=seed is not None):
        # torch.manual_seed would also reseed devices whose state nobody keeps.
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[index] for index in devices),
        ):
            if seed is not None:
                generator.manual_seed(seed)
        yield
