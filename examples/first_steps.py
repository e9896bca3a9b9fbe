"""Convert a network in Python, take a few training steps, save it, and load it as timm does.

    python examples/first_steps.py [MODEL] [FOLDER]

MODEL is a model of timm (default test_convnext, which is tiny). Random images stand in for your
data.
"""

import sys
from pathlib import Path

import timm
import torch
from rich import print

import dcls_convert


def main(name: str = "test_convnext", folder: str = "first-steps-dcls") -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)

    # Replace the depthwise convolutions. For a trained network, omit `init`: then elements are
    # fitted to its kernels.
    report = dcls_convert.convert_(model, dilated_size=17, init="random", input_size=(3, 64, 64))
    print(report)

    # Train as usual. As in the paper, positions have five times the learning rate of the weights,
    # and no weight decay.
    optimizer = torch.optim.AdamW(
        dcls_convert.tuning.param_groups(model, lr=1e-3, weight_decay=0.05)
    )
    images = torch.randn(8, 3, 64, 64)
    labels = torch.randint(10, (8,))
    for step in range(3):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.4f}")

    dcls_convert.save_converted(model.eval(), report.plan, folder, force=Path(folder).exists())
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        print(f"loaded by timm, outputs equal: {torch.equal(loaded(images), model(images))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
