"""The same commands write the same tensors and the same JSON in every environment."""

import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from dcls_convert.checkpoints.stored_weights import tensors_hash

from .trained import write_trained

pytestmark = pytest.mark.processes

MODEL = "timm:test_efficientnet"
WEIGHTS = ("--checkpoint", "weights.safetensors")
FITTED = (*WEIGHTS, "--calibrate", "images", "--scope", "error", "--budget", "80%")
COMMANDS = (
    (MODEL, "--json", "--output", "random"),
    (MODEL, *WEIGHTS, "--output", "fit"),
    (MODEL, *WEIGHTS, "--init", "largest", "--output", "largest"),
    (MODEL, *FITTED, "--output", "calibrated"),
    ("fold", "calibrated"),
    ("inspect", "calibrated", "--json"),
    ("sweep", MODEL, "--sizes", "7", *WEIGHTS, "--json"),
    ("models", "timm:test_byobnet", "--json", "--jobs", "1"),
)
# In the second, Python reads and writes text as ASCII unless an encoding is given.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENVIRONMENTS = (
    {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C.UTF-8"},
    {"PYTHONHASHSEED": "2", "TZ": "Pacific/Auckland", **ASCII},
)
PROGRAM = """
import contextlib, json, sys
from dcls_convert.cli.app import main
COMMANDS = json.loads(sys.argv[1])
for number, command in enumerate(COMMANDS):
    printed = f"{number}.json" if "--json" in command else "printed.txt"
    with open(printed, "w") as file, contextlib.redirect_stdout(file):
        try:
            sys.argv[1:] = command
            main()
        except SystemExit as end:
            assert end.code == 0, command
"""


def start(folder, environment):
    """Start all commands in one process, in a folder of its own."""
    folder.mkdir(parents=True)
    for name in ("weights.safetensors", "images"):
        (folder / name).symlink_to(folder.parents[1] / name)
    changed = {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "SOURCE_DATE_EPOCH": str(len(folder.name)),
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(COMMANDS)]
    environment = {**os.environ, **changed, **environment}
    return subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)


def written(folder):
    """Return the JSON and the hash of the tensors of each file, by path."""
    contents = {}
    for path in folder.rglob("*"):
        if path.suffix == ".json":
            contents[str(path.relative_to(folder))] = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors" and not path.is_symlink():
            contents[str(path.relative_to(folder))] = tensors_hash(load_file(path).items())
    return contents


def test_hash_seed_locale_time_zone_and_folder_leave_no_trace(tmp_path):
    write_trained(tmp_path, MODEL.partition(":")[2], images=12)
    folders = [tmp_path / f"{index}" / ("here" * (1 + index)) for index in range(len(ENVIRONMENTS))]
    processes = list(map(start, folders, ENVIRONMENTS))
    for process in processes:
        _, printed = process.communicate()
        assert process.returncode == 0, printed[-2000:]
    first, second = map(written, folders)
    assert len(first) > 15
    assert first == second
