"""What a calibration costs.

    python benchmarks/calibration.py [MODEL] [--scope SCOPE] [--images N] [--threads N]

Processor time of `convert_` with images, divided by that of one forward pass of the same images
through the original, and the memory that it needs beyond what the model and the images had. Images
are smooth noise, weights random; for EfficientNet-Lite0 they are its own. With PYTHONPATH at
another checkout the same is measured there.
"""

import argparse
import copy
import json
import resource
import time
from collections.abc import Callable

import timm
import torch
from lite0 import NAME, pretrained_network
from torch import nn

import dcls_convert
from dcls_convert.fitting.images import Calibration

BATCH = 8  # images, as a calibration has from a folder


def seconds(work: Callable[[], object]) -> float:
    """Processor time, of all threads."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def mebibytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=NAME)
    parser.add_argument("--scope", default="model")
    parser.add_argument("--dilated-size", type=int, default=9)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    network = (
        pretrained_network() if options.model == NAME else timm.create_model(options.model).eval()
    )
    noise = torch.randn(options.images, 3, 236, 236)
    images = 3 * nn.functional.avg_pool2d(noise, 13, stride=1)
    batches = images.split(BATCH)

    @torch.no_grad()
    def forward() -> None:
        for batch in batches:
            network(batch.contiguous(memory_format=torch.channels_last))

    seconds(forward)
    once = min(seconds(forward) for _ in range(3))
    before = mebibytes()
    calibration = Calibration(batches=tuple(batches))
    converted = copy.deepcopy(network)
    took = seconds(
        lambda: dcls_convert.convert_(
            converted,
            dilated_size=options.dilated_size,
            scope=options.scope,
            calibration=calibration,
        )
    )
    found = {
        "model": options.model,
        "scope": options.scope,
        "images": options.images,
        "threads": options.threads,
        "forward_s": round(once, 2),
        "convert_s": round(took, 2),
        "ratio": round(took / once, 2),
        "more_mib": round(mebibytes() - before),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
