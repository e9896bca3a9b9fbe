"""Run the implementations of kernel construction that are for exports and GPUs, on the CPU."""

from contextlib import contextmanager

import pytest

from dcls_convert.layers import bilinear, construction

ON_GPUS = ("eager", "compiled")


@contextmanager
def constructed(implementation):
    """Construct kernels in this way inside a `with` block; None is the CPU's own.

    "plain" is as under torch.func: by plain operations, which autograd differentiates.
    """
    with pytest.MonkeyPatch.context() as patch:
        if implementation in ON_GPUS:
            for module in (bilinear, construction):
                patch.setattr(module, "uses_cpu_implementation", lambda _: False)
        if implementation in ("plain", "compiled", "exported"):
            patch.setattr(bilinear, "is_eager", lambda *_: False)
        if implementation == "exported":
            patch.setattr(construction, "is_exporting", lambda: True)
        yield
