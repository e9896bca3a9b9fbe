"""Time inference and training steps of converted models, eager and under torch.compile, in turn.

    python benchmarks/compiled.py [MODEL:SIDE ...]

The unconverted model is timed, too. Prints the fastest of ROUNDS steps, after one warm-up step.
"""

from functools import partial

import timm
import torch
from measuring import fastest_in_turn, script_parser
from torch import nn

import dcls_convert

MODELS = ("test_convnext:96", "mobilenetv3_small_050:96")
BATCH = 8
ROUNDS = 6


def infer(model: nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        model(images)


def train(model: nn.Module, images: torch.Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()


def compare(name: str, side: int, *, converted: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = timm.create_model(name)
    if converted:
        dcls_convert.convert_(model, init="random", input_size=(3, side, side))
    compiled_model = torch.compile(model)
    images = torch.randn(BATCH, 3, side, side)
    state = "converted" if converted else "unconverted"
    for step in (infer, train):
        model.train(step is train)
        ways = [partial(step, model, images), partial(step, compiled_model, images)]
        eager, compiled = fastest_in_turn(ways, ROUNDS)
        print(
            f"{name}, {side} px, {state}, {step.__name__}: eager {1e3 * eager:.1f} ms, "
            f"compiled {1e3 * compiled:.1f} ms, {compiled / eager:.2f} times",
            flush=True,
        )


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL:SIDE")
    torch.set_num_threads(1)
    for model in parser.parse_args().models:
        name, side = model.split(":")
        for converted in (True, False):
            compare(name, int(side), converted=converted)


if __name__ == "__main__":
    main()
