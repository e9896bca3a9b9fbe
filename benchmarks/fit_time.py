"""Measure how long the warm start takes, and how close it comes to the old kernels.

    python benchmarks/fit_time.py [MODEL SIZE]...

Without arguments, this runs convnext_tiny at 17 and resnet50 at 7. The weights are as timm
initialises them, which is the hardest case: kernels without structure. Errors are
|new - old| / |old| of a kernel, averaged over layers.
"""

import sys
import time

import timm
import torch

from dcls_convert import apply_plan_, find_convs, plan_conversion


def main(names: list[str]) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, size in zip(names[::2], names[1::2], strict=True):
        means = {}
        for init in ("largest", "fit"):
            torch.manual_seed(0)
            model = timm.create_model(name)
            plan = plan_conversion(find_convs(model), dilated_size=int(size))
            start = time.perf_counter()
            errors = apply_plan_(model, plan, init=init).kernel
            seconds = time.perf_counter() - start
            means[init] = sum(errors.values()) / len(errors)
            print(
                f"{name} {size}: {init:7} {seconds:6.1f} s, "
                f"mean relative kernel error {means[init]:.3f}"
            )
        print(f"{name} {size}: ratio of the errors {means['fit'] / means['largest']:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["convnext_tiny", "17", "resnet50", "7"])
