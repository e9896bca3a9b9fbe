"""Examples do what they say."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import torchvision

import dcls_convert
from dcls_convert.checkpoints.verify import rebuild_here, verify_folder

ROOT = Path(__file__).parent.parent


def test_first_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["first_steps.py"])
    runpy.run_path(str(ROOT / "examples" / "first_steps.py"), run_name="__main__")
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "loaded by timm, outputs equal: True" in out


@pytest.mark.slow
def test_what_a_new_user_writes_first(tmp_path, monkeypatch):
    """A trained ResNet-18 of torchvision: converted, trained in mixed precision, saved, loaded, folded."""
    monkeypatch.chdir(tmp_path)
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([1, 7])
    torch.save(torchvision.models.resnet18().state_dict(), "weights.pth")

    model = torchvision.models.resnet18()
    model.load_state_dict(torch.load("weights.pth"))
    report = dcls_convert.convert_(model, dilated_size=5, init="largest", input_size=(3, 64, 64))
    assert report.params.after <= report.params.before
    assert "layer1.0.conv1" in {layer.name for layer in report.layers}
    optimizer = torch.optim.AdamW(dcls_convert.tuning.param_groups(model, lr=1e-4))
    start = {name: tensor.clone() for name, tensor in model.named_parameters()}
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(not torch.equal(tensor, start[name]) for name, tensor in model.named_parameters())

    dcls_convert.save_converted(model, report.plan, "resnet18-dcls5")
    loaded, outputs = dcls_convert.load_converted("resnet18-dcls5").eval(), model.eval()(images)
    assert torch.equal(loaded(images), outputs)
    assert verify_folder("resnet18-dcls5", rebuild=rebuild_here).ok
    dcls_convert.fold_to_dense_(loaded)
    torch.testing.assert_close(loaded(images), outputs, rtol=0, atol=1e-4)
