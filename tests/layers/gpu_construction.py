"""Run the GPU implementations of kernel construction on the CPU."""

from contextlib import contextmanager

import pytest

from dcls_convert.layers import bilinear, construction

IMPLEMENTATIONS = ("eager", "compiled")


@contextmanager
def as_on_a_gpu(implementation):
    """Construct kernels by this implementation inside a `with` block; None is the CPU's own."""
    with pytest.MonkeyPatch.context() as patch:
        if implementation:
            for module in (bilinear, construction):
                patch.setattr(module, "uses_cpu_implementation", lambda _: False)
        if implementation == "compiled":
            patch.setattr(bilinear, "is_eager", lambda *_: False)
        yield
