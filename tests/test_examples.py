"""Examples do what they say."""

import re
import runpy
from pathlib import Path

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
