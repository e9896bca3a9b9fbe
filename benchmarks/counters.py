"""Compare what counters say about a converted resnet18, unfolded and folded, with its report.

    pip install torchinfo ptflops fvcore calflops thop  # the counters to compare
    python benchmarks/counters.py

Prints MACs and parameters in millions; a counter that is not installed is left out.
"""

import contextlib
import copy
import importlib.metadata
import importlib.util
import io
import logging
import warnings
from collections.abc import Callable

import timm
import torch
from torch import nn

import dcls_convert

SHAPE = (1, 3, 96, 96)
WINDOW = 7

Counts = tuple[float, float]  # MACs and parameters


def by_torch(model: nn.Module) -> Counts:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.randn(SHAPE))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return counter.get_total_flops() / 2, parameters


def by_torchinfo(model: nn.Module) -> Counts:
    import torchinfo

    counted = torchinfo.summary(model, input_size=SHAPE, verbose=0)
    return counted.total_mult_adds, counted.total_params


def by_ptflops(backend: str) -> Callable[[nn.Module], Counts]:
    def count(model: nn.Module) -> Counts:
        import ptflops

        return ptflops.get_model_complexity_info(
            model,
            SHAPE[1:],
            as_strings=False,
            print_per_layer_stat=False,
            backend=backend,
        )

    return count


def by_fvcore(model: nn.Module) -> Counts:
    import fvcore.nn

    counted = fvcore.nn.FlopCountAnalysis(model, torch.randn(SHAPE))
    return counted.total(), fvcore.nn.parameter_count(model)[""]


def by_calflops(model: nn.Module) -> Counts:
    from calflops import calculate_flops

    _, macs, parameters = calculate_flops(
        model, input_shape=SHAPE, print_results=False, output_as_string=False
    )
    return macs, parameters


def by_thop(model: nn.Module) -> Counts:
    import thop

    return thop.profile(model, (torch.randn(SHAPE),), verbose=False)


COUNTERS = {
    "torch's FlopCounterMode": ("torch", by_torch),
    "ptflops, backend aten": ("ptflops", by_ptflops("aten")),
    "fvcore": ("fvcore", by_fvcore),
    "calflops": ("calflops", by_calflops),
    "torchinfo": ("torchinfo", by_torchinfo),
    "ptflops, default backend": ("ptflops", by_ptflops("pytorch")),
    "thop": ("thop", by_thop),
}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    model = timm.create_model("resnet18").eval()
    report = dcls_convert.convert_(model, dilated_size=WINDOW, init="random", input_size=SHAPE[1:])
    folded = copy.deepcopy(model)
    dcls_convert.fold_to_dense_(folded)
    print(
        f"report: {report.macs.after / 1e6:,.1f} M MACs, "
        f"{report.params.after / 1e6:.2f} M parameters"
    )
    for name, (package, count) in COUNTERS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed")
            continue
        counts = []
        for network in (model, folded):
            with contextlib.redirect_stdout(io.StringIO()):
                macs, parameters = count(copy.deepcopy(network))
            counts.append(f"{macs / 1e6:,.1f} M MACs, {parameters / 1e6:.2f} M parameters")
        version = importlib.metadata.version(package)
        print(f"{name} {version}: converted {counts[0]}; folded {counts[1]}")


if __name__ == "__main__":
    main()
