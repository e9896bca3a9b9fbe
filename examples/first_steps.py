"""Convert a network in Python, take a few training steps, save it, and load it as timm does.

    python examples/first_steps.py [MODEL] [FOLDER]

MODEL is a model of timm (default test_convnext, which is tiny). Random images stand in for your data.
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

    # Replace the depthwise convolutions: the largest cells of each kernel become elements that can move.
    report = dcls_convert.convert_(model, dilated_size=17, input_size=(3, 64, 64))
    print(report)

    # Train as ever. The paper uses no weight decay and a five times larger learning rate for positions.
    positions = [p for n, p in model.named_parameters() if n.endswith(("positions", "sigma"))]
    others = [p for n, p in model.named_parameters() if not n.endswith(("positions", "sigma"))]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.05}, {"params": positions, "weight_decay": 0.0, "lr": 5e-3}], lr=1e-3
    )
    images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
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
