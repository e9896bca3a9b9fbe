"""Run the implementations of kernel construction that are for transforms and GPUs, on the CPU."""

from contextlib import contextmanager

import pytest

from dcls_convert.layers import bilinear, profiles

ON_GPUS = ("eager", "compiled")


@contextmanager
def constructed(implementation):
    """Construct kernels in this way inside a `with` block; None is the CPU's own.

    "plain" is as under torch.func and in exports: by profiles, which autograd differentiates.
    """
    with pytest.MonkeyPatch.context() as patch:
        if implementation in ON_GPUS:
            for module in (bilinear, profiles):
                patch.setattr(module, "uses_cpu_implementation", lambda _: False)
        if implementation in ("plain", "compiled"):
            patch.setattr(bilinear, "is_eager", lambda *_: False)
        yield
