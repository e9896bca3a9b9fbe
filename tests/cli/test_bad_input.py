"""Whatever is wrong with what `dcls-convert` is given ends in one line, the documented exit code, and nothing written.

A row of the tables is one kind of mistake: what is given, and what the line must say about it.
"""

import contextlib
import json
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError

import huggingface_hub.constants
import pytest
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn

import dcls_convert.checkpoints.save
from dcls_convert.cli.app import main
from dcls_convert.errors import CheckpointError
from dcls_convert.networks.weights import read_weights
from dcls_convert.planning.rules import builtin_rules

from ..conftest import TINY  # 9 depthwise 7x7 convolutions, first stages.0.blocks.0.conv_dw

MISTAKE, NOTHING_MATCHES, INTERRUPTED = 2, 3, 130
SMALL = ("--input-size", "3x32x32")  # for speed
OWN = f"{__name__}:build"
NOBODY = 65534
TOO_LONG = "a" * 300  # no file system takes such a name


def build():
    """A network of the user's own that converts in no time."""
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)))


def table(rows):
    """Rows of given: what the line must say, or id: (given, what it must say...)."""
    rows = {kind: row if isinstance(row, tuple) else (kind, row) for kind, row in rows.items()}
    return pytest.mark.parametrize(
        ("given", "says"), [pytest.param(given, says, id=kind) for kind, (given, *says) in rows.items()]
    )


def snapshot(folder):
    """Everything in a folder, hidden files too, with its content or where the link points."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else f"mode {path.stat().st_mode:o}"
        for path in folder.rglob("*")
    }


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """Neither what terminals wish for nor bytecode; signal handlers and the user's module go afterwards."""
    for variable in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "DCLS_CONVERT_TRACEBACK"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    sys.modules.pop("mymodel", None)


def run(arguments, capfd):
    """Exit code, stdout, stderr."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    return stop.value.code, *capfd.readouterr()


def check_refusal(code, out, err, *, says, expected):
    """One line, the last, that says all of `says` (texts or patterns); the exit code; nothing on stdout."""
    assert "Traceback" not in out + err
    lines = err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, f"not one line of error: {err!r}"
    assert lines[-1] == errors[0]
    for part in says:
        assert re.search(part if isinstance(part, re.Pattern) else re.escape(part), lines[-1]), f"{part!r}: {err}"
    assert (code, lines[-1]) == (expected, lines[-1])
    assert out == ""
    return lines[-1]


@pytest.fixture
def refused(tmp_path, capfd, monkeypatch):
    """Runs `dcls-convert` in `tmp_path` (or `cwd` in it) and checks that it refuses; returns the line."""

    def check(*arguments, says, code=MISTAKE, cwd="."):
        monkeypatch.chdir(tmp_path / cwd)
        before = snapshot(tmp_path)
        result = run(arguments, capfd)
        after = snapshot(tmp_path)
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        assert not changed, result[2]
        return check_refusal(*result, says=says, expected=code)

    return check


@pytest.fixture
def accepted(tmp_path, capfd, monkeypatch):
    def check(*arguments):
        monkeypatch.chdir(tmp_path)
        code, _, err = run(arguments, capfd)
        assert (code, "error: " in err) == (0, False), err

    return check


# --- The command line itself


@table(
    {
        "--dry-run": "Missing argument 'MODEL'",
        "convert": "Missing argument 'MODEL'",
        f"{TINY} --nope": "No such option: --nope",
        f"{TINY} --dilate-size 17": re.compile("No such option: --dilate-size.*--dilated-size"),
        f"{TINY} -x": "No such option: -x",
        f"{TINY} --dilated-size": "'--dilated-size' requires an argument",
        f"{TINY} --dry-run=1": "'--dry-run' does not take a value",
        f"{TINY} extra": re.compile("unexpected extra argument.*extra"),
        "rules nope": "No such command 'nope'",
        "rules show": "Missing argument",
        "rules show nope": "rules 'nope' are neither a file nor one of conv3x3, dense3x3",
        "rules check": "Missing argument 'FILE'",
        "rules check nope.yaml": "rules 'nope.yaml' are neither a file nor one of conv3x3, dense3x3",
        "rules list x": "unexpected extra argument",
        "rules schema --x": "No such option: --x",
    }
)
def test_usage(refused, given, says):
    refused(*given.split(), says=says)


@pytest.mark.parametrize("given", [[], ["rules"]], ids=["dcls-convert", "dcls-convert rules"])
def test_nothing_at_all_shows_the_help_and_no_empty_error(given, capfd):
    _, out, err = run(given, capfd)
    assert "Usage: " in out + err
    assert "error:  " not in err


# --- MODEL


@table(
    {
        "misspelt": ("convnext_ato", "'convnext_ato'", "did you mean 'convnext_atto'"),
        "like nothing": ("xyzzy", "no model 'xyzzy'"),
        "not ASCII": ("é", "no model 'é'"),
        "newline": ("convnext_atto\n", r"no model 'convnext_atto\n'", "did you mean 'convnext_atto'"),
        "empty": ("", "model '' has no name"),
        "blank": ("  ", "has no name"),
        "timm alone": ("timm:", "model 'timm:' has no name"),
        "torchvision alone": ("torchvision:", "model 'torchvision:' has no name"),
        "local-dir alone": ("local-dir:", "model 'local-dir:' has no name"),
        "module alone": ("json:", "model 'json:' has no name"),
        "function alone": (":build", ":build", "mpty module name"),
        "unknown in timm": ("timm:resnet81", "no model 'timm:resnet81'", "did you mean 'resnet"),
        "unknown tag": ("resnet18.nope", "no weights tagged 'nope'", "a1_in1k", "tv_in1k"),
        "unknown in torchvision": (
            "torchvision:resnet81",
            "no model 'torchvision:resnet81'",
            "did you mean 'resnet18'",
        ),
        "timm's in torchvision": ("torchvision:convnext_atto", "no model 'torchvision:convnext_atto'"),
        "our entry": ("dcls_convert", re.compile("no model 'dcls_convert'|not a model by itself")),
        "timm:dcls": ("timm:dcls", re.compile("no model 'timm:dcls'|not a model by itself")),
        "no module": ("nomodule_x:build", "module 'nomodule_x' cannot be imported", "No module named"),
        "no package": ("a..b:build", "'a..b' cannot be imported"),
        "relative module": (".rel:build", ".rel:build", "relative import"),
        "no attribute": ("os:nothing", "module 'os' has no function 'nothing'"),
        "no function": ("os:sep", "module 'os' has no function 'sep'"),
        "function for no model": ("os:getcwd", "gives a str, not a torch.nn.Module"),
        "local-dir gone": ("local-dir:nowhere", "local-dir:nowhere: nowhere/config.json cannot be read: No such file"),
        "hub, not cached": ("hf-hub:timm/nope-nope", "hf-hub:timm/nope-nope", "not in the local cache"),
        "hub, no repository": ("hf-hub:a/b/c", "hf-hub:a/b/c", "'namespace/repo_name'"),
    }
)
def test_model_names(refused, given, says):
    refused(given, "--dry-run", says=says)


CONV = """from torch import nn
def conv(size, **k):
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1, **k), nn.Conv2d(8, 8, size, **k)))
"""  # the first takes the image, which makes it the stem


@table(
    {
        "syntax error": ("def build(:", "mymodel:build", "SyntaxError", "mymodel.py, line 1"),
        "fails on import": ("1 / 0", "ZeroDivisionError: division by zero"),
        "imports what is not there": ("import nope_nope", "cannot be imported: No module named 'nope_nope'"),
        "several lines": ("def build(): raise ValueError('first\\nsecond')", "ValueError: first second"),
        "raises without a word": ("def build(): raise Exception", "mymodel:build", "cannot be built", "Exception"),
        "assertion": ("def build(): assert False", "cannot be built: AssertionError"),
        "endless recursion": ("def build(): return build()", "cannot be built: RecursionError"),
        "out of memory": ("def build(): raise MemoryError", "cannot be built: MemoryError"),
        "leaves the program": ("import sys\ndef build(): sys.exit(7)", "mymodel:build", "SystemExit"),
        "needs an argument": ("def build(x): pass", "missing 1 required positional argument: 'x'"),
        "not callable": ("build = 3", "module 'mymodel' has no function 'build'"),
        "gives nothing": ("def build(): pass", "gives a NoneType, not a torch.nn.Module"),
        "gives a class": (f"{CONV}def build(): return nn.Linear", "gives a type, not a torch.nn.Module"),
        "is a model": (f"{CONV}build = nn.Linear(2, 2)", "mymodel:build", "cannot be built"),
        "gives no weights": (f"{CONV}def build(): return conv(3, device='meta')", "mymodel:build", "meta"),
        "gives other models": (
            f"{CONV}sizes = [3, 5]\ndef build(): return conv(sizes.pop(0))",
            "kernel_size is (5, 5), the plan has (3, 3)",
        ),
        "warns": ("import warnings\nwarnings.warn('old')\ndef build(): return 3", "gives a int"),
    }
)
def test_models_of_the_users_own(refused, tmp_path, given, says):
    (tmp_path / "mymodel.py").write_text(given)
    refused("mymodel:build", says=says)


@table(
    {
        "--num-classes 3": "unexpected keyword argument 'num_classes'",
        "--in-chans 3": "unexpected keyword argument 'in_chans'",
        "--pretrained": "--pretrained is for timm and torchvision",
        "--input-size 4x9x9": re.compile("--input-size 4x9x9: .*hannel"),
    }
)
def test_options_that_the_users_model_does_not_take(refused, given, says):
    refused(OWN, *given.split(), says=says)


@table(
    {
        "no config": (None, "local-dir:folder", "config.json"),
        "empty": ("", "local-dir:folder", "JSON", "line 1 column 1"),
        "broken": ("{", "local-dir:folder", "JSON", "line 1 column 2"),
        "no architecture": (
            "{}",
            "local-dir:folder: folder/config.json names no architecture; it is not a config of timm",
        ),
        "a list": ("[]", "local-dir:folder: folder/config.json names no architecture; it is not a config of timm"),
        "unknown architecture": ('{"architecture": "nope"}', "local-dir:folder", "nope"),
        "our architecture": ('{"architecture": "dcls_convert"}', '"dcls_convert" is not a model by itself'),
        "no weights": ('{"architecture": "test_convnext"}', "pretrained weights cannot be had", "folder"),
    }
)
def test_local_folders(refused, tmp_path, given, says):
    (tmp_path / "folder").mkdir()
    if given is not None:
        (tmp_path / "folder" / "config.json").write_text(given)
    refused("local-dir:folder", "--pretrained", says=says)


@table(
    {
        "hf-hub:timm/nope-nope": "hf-hub:timm/nope-nope: cannot be built",
        f"{TINY} --pretrained": f"timm:{TINY}: its pretrained weights cannot be had",
        "test_mambaout --pretrained": "No pretrained weights exist for test_mambaout",
        "torchvision:resnet18 --pretrained": "torchvision:resnet18: its pretrained weights cannot be had",
        "torchvision:resnet18 --pretrained --num-classes 3": "fixed number of classes",
        "torchvision:resnet18 --in-chans 4": "fixed number of input channels",
    }
)
def test_weights_that_cannot_be_had(refused, monkeypatch, tmp_path_factory, given, says):
    def offline(*_, **__):
        raise URLError("no network in this test")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    refused(*given.split(), says=says)


def test_what_torch_says_of_a_download_is_not_in_the_results(monkeypatch, tmp_path, tmp_path_factory, capfd):
    name = "shufflenet_v2_x0_5"

    def download(_, path, *__, **___):
        torch.save(torchvision.models.get_model(name).state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    monkeypatch.chdir(tmp_path)
    code, out, err = run([f"torchvision:{name}", "--pretrained", "--json", "--output", "out"], capfd)
    assert code == 0, err
    assert "Downloading" not in out
    assert "Downloading" in err
    assert isinstance(json.loads(out), dict)


# --- Options, in themselves and for this model


@pytest.mark.parametrize(
    ("option", "values", "allowed"),
    [
        (
            "--dilated-size",
            ["0", "-17", "abc", "", "17x", "x17", "17x0", "17.0", "17*17", "+17", " 17", "17x17x17x17", "\uff11\uff17"],
            "is not a size; give an integer from 1 to 9999 such as 17, or sides such as 17x9",
        ),
        (
            "--kernel-count",
            ["0", "-1", "x", "1.5", "", "AUTO", "auto ", "\u0663"],
            "must be an integer from 1 to 1000000000, or auto",
        ),
        (
            "--input-size",
            ["3", "3x", "x", "", "0x9x9", "3x-1x9", "3x1x1x1x1", "3,9,9", "3x6.5x9", "3 x 9 x 9", "abc", "\uff13x9x9"],
            "must be channels and sides, each from 1 to 9999, such as 3x224x224",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("--") else "",
)
def test_numbers_that_are_none(refused, option, values, allowed):
    for value in values:
        refused(TINY, option, value, says=[f"{option} {value!r} {allowed}"])


NINES = "9" * 57 + "..."
SIZE = "is not a size; give an integer from 1 to 9999"
INPUT = "must be channels and sides, each from 1 to 9999"
PERCENT = "must be a percentage from 0.0001 to 100000"
SEED = f"must be an integer from 0 to {2**63 - 1}"
A_MOST = re.compile(r"from 1 to \d+|use \d+ or fewer|at most \d+")
COUNT_STATED = "--kernel-count states the count, so --budget and --scope would have no effect"


@table(
    {
        "--dilated-size 16": re.compile(r"blocks\.0\.conv_dw: window 16 .* must be odd as the kernel 7 is.* 15 or 17"),
        "--dilated-size 17x16": re.compile(r"window 16 \(axis 1 of 17x16\) must be odd .* use 15 or 17"),
        "--dilated-size 5": re.compile("window 5 .* is smaller than the kernel 7 .* use 7 or more"),
        "--dilated-size 17x17x17": "conv_dw: the size 17x17x17 is for 3-D, this convolution is 2-D",
        "--dilated-size 17x1": "axis 1 must keep its size 7",
        "--dilated-size 10000": f"--dilated-size '10000' {SIZE}",
        "--dilated-size 17x10000": f"--dilated-size '17x10000' {SIZE}",
        "size of 5000 digits": (f"--dilated-size {'9' * 5000}", f"--dilated-size '{NINES}' {SIZE}"),
        "size beyond 64 bits": (f"--dilated-size {10**30 + 1}", f"--dilated-size '{10**30 + 1}' {SIZE}"),
        "size beyond any memory": (f"--dilated-size {2**40 + 1}", f"--dilated-size '{2**40 + 1}' {SIZE}"),
        "--kernel-count 290": "count 290 is more than the 289 cells of its window; use 289 or fewer",
        # such counts are positive integers: to say that they must be would not help
        "count of 5000 digits": (f"--kernel-count {'9' * 5000}", f"--kernel-count '{NINES}'", A_MOST),
        "count beyond any window": (f"--kernel-count {10**10}", re.compile(f"count '?{10**10}"), A_MOST),
        "--budget 0": f"budget '0' {PERCENT}",
        "--budget -5": f"budget '-5' {PERCENT}",
        "--budget nan": f"budget 'nan' {PERCENT}",
        "--budget snan": f"budget 'snan' {PERCENT}",
        "--budget inf": f"budget 'inf' {PERCENT}",
        "--budget abc": "budget 'abc' must be a percentage from 0.0001 to 100000",
        "--budget 100%": "budget '100%' must be a percentage from 0.0001 to 100000",
        "--budget ''": "budget '' must be a percentage from 0.0001 to 100000",
        "--budget 1": re.compile(r"a budget of 1 % .*; the smallest budget that does is [\d.]+ %"),
        "--budget 0.0001": re.compile(r"a budget of 0\.0001 % .*; the smallest budget that does is [\d.]+ %"),
        "--budget 1e-5": f"budget '1e-5' {PERCENT}",
        "--budget 1e400": f"budget '1e400' {PERCENT}",
        "--budget 100001": f"budget '100001' {PERCENT}",
        "--scope nope": re.compile("'--scope'.* 'nope' is not one of 'model', 'stage', 'layer'"),
        "--scope Model": re.compile("'--scope'.* 'Model' is not one of 'model', 'stage', 'layer'"),
        "--scope ''": re.compile("'--scope'.* '' is not one of 'model', 'stage', 'layer'"),
        "--tie nope": re.compile("'--tie'.* 'nope' is not one of 'stage', 'none'"),
        "--interpolation cubic": re.compile("'--interpolation'.* 'cubic' .* 'bilinear', 'triangle', 'gaussian'"),
        "--init nope": re.compile("'--init'.* 'nope' is not one of 'auto', 'random', 'largest'"),
        "--positions grid": re.compile("'--positions'.* 'grid' is not one of 'normal', 'uniform'"),
        "--seed -1": f"--seed '-1' {SEED}",
        "--seed x": f"--seed 'x' {SEED}",
        "--seed 1.5": f"--seed '1.5' {SEED}",
        "seed beyond 64 bits": (f"--seed {2**64}", f"--seed '{2**64}' {SEED}"),
        "--num-classes -1": "--num-classes '-1' must be an integer from 0 to 1000000000",
        "--num-classes x": "--num-classes 'x' must be an integer from 0 to 1000000000",
        "--in-chans 0": "--in-chans '0' must be an integer from 1 to 1000000000",
        "--in-chans x": "--in-chans 'x' must be an integer from 1 to 1000000000",
        "--input-size 4x64x64": re.compile("--input-size 4x64x64: .*hannel"),
        "--input-size 3x1x1": "--input-size 3x1x1: the model does not run on the meta device at (3, 1, 1): ",
        "--input-size 1x64x64x64": "input size 1x64x64x64 must be channels and 2 sides, the model is 2-D",
        "--in-chans 4 --input-size 3x32x32": re.compile("--input-size 3x32x32: .*hannel"),
        "--input-size 3x10000x9": f"--input-size '3x10000x9' {INPUT}",
        "input of 5000 digits": (f"--input-size {'9' * 5000}x9x9", f"--input-size '{NINES}' {INPUT}"),
        "input beyond 64 bits": (f"--input-size 3x{10**20}x64", f"--input-size '3x{10**20}x64' {INPUT}"),
        "--rules depthwize": re.compile("rules 'depthwize' .*did you mean 'depthwise'"),
        "--rules nope.yaml": "rules 'nope.yaml' are neither a file nor one of conv3x3, dense3x3",
        "--rules ''": "rules '' are neither a file",
        "--rules .": "rules '.' are neither a file",
        "--rules /dev/null": "rules '/dev/null' are neither a file",
        "rules too long": (f"--rules {TOO_LONG}", f"rules '{TOO_LONG[:57]}...'", "File name too long"),
        "--checkpoint gone.pth": "checkpoint gone.pth: there is no such file",
        "--checkpoint no/c.pth": "checkpoint no/c.pth: there is no such file",
        "--checkpoint ''": "checkpoint .: is not a file",
        "--checkpoint /": "checkpoint /: is not a file",
        "checkpoint too long": (f"--checkpoint {TOO_LONG}", f"checkpoint {TOO_LONG[:57]}...: File name too long"),
        # options in conflict
        "--pretrained --checkpoint x": "--pretrained and --checkpoint exclude each other",
        "--dry-run --force": "--force has no effect with --dry-run",
        "--dry-run --output x": "--output has no effect with --dry-run",
        "-q -v": "--quiet and --verbose exclude each other",
        "--json -v": "--json and --verbose exclude each other",
        "-q --dry-run": "--quiet with --dry-run would print nothing",
        "--init largest": "--init largest needs trained kernels: --pretrained or --checkpoint",
        "--init fit": "--init fit needs trained kernels: --pretrained or --checkpoint",
        "--init exact --kernel-count 9": "--init exact takes an element for each cell of the old kernels: leave",
        "--init exact --budget 90": "--init exact takes an element for each cell of the old kernels: leave",
        "--init exact --interpolation gaussian": "gaussian interpolation spreads an element over several cells",
        "--init exact --positions uniform": "--positions is for random positions, --init auto or exact keeps",
        "--calibrate .": "--calibrate is for --init fit, with --pretrained or --checkpoint",
        "--positions uniform --pretrained": re.compile("--positions is for random positions.*use --init random"),
        "--positions uniform --checkpoint x": re.compile("--positions is for random positions.*use --init random"),
        "--kernel-count 3 --budget 50": COUNT_STATED,
        "--kernel-count 3 --scope stage": COUNT_STATED,
        "--kernel-count 3 --scope layer": COUNT_STATED,
    }
)
def test_options(refused, given, says):
    refused(TINY, *(SMALL if "--input-size" not in given else ()), *shlex.split(given), says=says)


@pytest.mark.parametrize("options", ["", "--scope stage", "--scope layer --tie none", "--interpolation gaussian"])
def test_the_smallest_budget_named_is_the_smallest(refused, accepted, options):
    call = (TINY, "--dry-run", *SMALL, *options.split(), "--budget")
    found = re.search(r"the smallest budget that does is ([\d.]+) %", refused(*call, "0.5", says=["admits no element"]))
    accepted(*call, found[1])
    refused(*call, f"{float(found[1]) - 0.01:.2f}", says=[found[0]])


@table(
    {
        "--dilated-size 16": re.compile(r"use (\d+) or (\d+)"),
        "--dilated-size 5": re.compile(r"use (\d+) or more"),
        "--kernel-count 290": re.compile(r"use (\d+) or fewer"),
    }
)
def test_what_a_message_advises_works(refused, accepted, given, says):
    call = (TINY, "--dry-run", *SMALL)
    for value in says[0].search(refused(*call, *given.split(), says=says)).groups():
        accepted(*call, given.split()[0], value)


# --- Rule files

DEPTHWISE = "match: {kind: depthwise}"
RULE = f"{DEPTHWISE}, dilated_kernel_size: 17"
WRONG_SIZE = "found {}; allowed is a positive integer for all sides, or a list with one for each side"
WRONG_COUNT = "found {}; allowed is a positive integer, or auto"
A_GLOB = "allowed is a pattern with * and ?, or a list of such patterns"
NO_YAML = "not valid YAML"
A_MAPPING = ", but must be a mapping with format, description, defaults, rules"


def in_rule(text):
    return f"format: 1\nrules: [{{{text}}}]"


@pytest.fixture
def refused_rules(refused, tmp_path):
    """Checks that `--rules my.yaml` is refused, and by `rules check` too where it takes no model to see."""

    def check(content, says, *options, code=MISTAKE, alone=False):
        (tmp_path / "my.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        if alone:
            refused("rules", "check", "my.yaml", says=["my.yaml:", *says])
        return refused(TINY, *SMALL, "--rules", "my.yaml", *options, says=says, code=code)

    return check


@table(
    {
        "empty": ("", f"my.yaml: is empty{A_MAPPING}"),
        "comment": ("# nothing", f"my.yaml: is empty{A_MAPPING}"),
        "list": ("- a", f"my.yaml: is a list{A_MAPPING}"),
        "empty list": ("[]", f"my.yaml: is a list{A_MAPPING}"),
        "text": ("abc", f"my.yaml: is a text{A_MAPPING}"),
        "number": ("5", f"my.yaml: is of type int{A_MAPPING}"),
        "bracket": ("format: 1\nrules: [", "line 2", NO_YAML),
        "colons": ("a: b: c", "line 1", NO_YAML, "mapping values are not allowed here"),
        "tab": ("\tformat: 1", "line 1", NO_YAML, "cannot start any token"),
        "quote": ('format: 1\nrules: "x', NO_YAML, "found unexpected end of stream"),
        "no such alias": ("format: 1\nrules: *x", "line 2", NO_YAML, "found undefined alias 'x'"),
        "two documents": ("a: 1\n---\nb: 2", "line 2", NO_YAML, "another document"),
        "NUL": ("format: 1\n\0", NO_YAML, "#x0000"),
        "too deep": ("[" * 600, NO_YAML),
        "no such date": ("format: 2020-13-45", NO_YAML, "month must be in 1..12"),
        "too many digits": (f"format: {'1' * 5000}", NO_YAML),
        "list as key": ("? [a, b]\n: c", NO_YAML),
        "number as key": ("1: 2\nformat: 1\nrules: [{}]", "unknown key"),
        "holds itself": ("&a [*a]", f"my.yaml: is a list{A_MAPPING}"),
        "bad merge": ("<<: 5", "line 1", NO_YAML),
        "Python tag": ("format: !!python/object/apply:os.mkdir [code_has_run]", "line 1", NO_YAML, "os.mkdir"),
        "own tag": ("format: !own 1", "line 1", NO_YAML, "'!own'"),
        "!!int": ('format: !!int ""', NO_YAML),
        "!!bool": ("format: !!bool x", NO_YAML),
        "!!timestamp": ("format: !!timestamp x", NO_YAML),
        "!!set": ("format: !!set [1]", NO_YAML),
        "not UTF-8": (b"format: 1 # \xff", "UTF-8"),
        "UTF-16": (in_rule(RULE).encode("utf-16"), "UTF-8"),
        "duplicate key": ("format: 1\nformat: 1\nrules: [{}]", "line 2", "key 'format' stands twice"),
        "duplicate key in rule": (in_rule("skip: a, skip: b"), "line 2", "key 'skip' stands twice"),
        "duplicate key in match": (in_rule("match: {dims: 1, dims: 2}"), "line 2", "key 'dims' stands twice"),
        "no format": ("rules: [{}]", "top level: format is missing"),
        "no rules": ("format: 1", "top level: rules is missing"),
        "misspelt key": ("format: 1\nrulez: [{}]", "unknown key 'rulez' (did you mean 'rules'?)", "known: format"),
        "unknown format": ("format: 2\nrules: [{}]", "format: found 2; allowed is 1"),
        "format a text": ("format: '1'\nrules: [{}]", "format: found '1'; allowed is 1"),
        "format a bool": (f"format: true\nrules: [{{{RULE}}}]", "format: found True; allowed is 1"),
        "format a float": (f"format: 1.0\nrules: [{{{RULE}}}]", "format: found 1.0; allowed is 1"),
        "no rule": ("format: 1\nrules: []", "rules: found []; allowed is a list of at least one rule"),
        "rules null": ("format: 1\nrules:", "rules: found None; allowed is a list of at least one rule"),
        "rules a mapping": ("format: 1\nrules: {}", "rules: found {}; allowed is a list of at least one rule"),
        "rule a text": ("format: 1\nrules: [x]", "rules[0]: found 'x'", "mapping"),
        "rule null": ("format: 1\nrules: [null]", "rules[0]: found None", "mapping"),
        "second rule": ("format: 1\nrules: [{}, {nam: x}]", "rules[1]: unknown key 'nam' (did you mean 'name'?)"),
    }
)
def test_rule_files(refused_rules, given, says):
    refused_rules(given, says, alone=True)


@table(
    {
        "description: 3": "description: found 3; allowed is a text",
        "defaults: 17": "defaults: found 17; allowed is a mapping",
        "defaults: {dilated_size: 9}": "defaults: unknown key 'dilated_size' (did you mean 'dilated_kernel_size'?)",
        "defaults: {dilated_kernel_size: x}": "defaults.dilated_kernel_size: " + WRONG_SIZE.format("'x'"),
    }
)
def test_rule_files_around_the_rules(refused_rules, given, says):
    refused_rules(f"{in_rule(RULE)}\n{given}", says, alone=True)


@table(
    {
        "dilated_kernel_sise: 9": ": unknown key 'dilated_kernel_sise' (did you mean 'dilated_kernel_size'?)",
        "name: 3": ".name: found 3; allowed is a text",
        "skip: true": ".skip: found True; allowed is a text with the reason",
        "skip: why, dilated_kernel_size: 17": ": a rule that skips cannot also state dilated_kernel_size",
        "skip: why, kernel_count: 3": ": a rule that skips cannot also state kernel_count",
        "dilated_kernel_size: big": ".dilated_kernel_size: " + WRONG_SIZE.format("'big'"),
        "dilated_kernel_size: 17.0": ".dilated_kernel_size: " + WRONG_SIZE.format("17.0"),
        "dilated_kernel_size: 0": ".dilated_kernel_size: " + WRONG_SIZE.format("0"),
        "dilated_kernel_size: true": ".dilated_kernel_size: " + WRONG_SIZE.format("True"),
        "dilated_kernel_size: []": ".dilated_kernel_size: " + WRONG_SIZE.format("[]"),
        "dilated_kernel_size: [1, 1, 1, 1]": ".dilated_kernel_size: " + WRONG_SIZE.format("[1, 1, 1, 1]"),
        "dilated_kernel_size: [17, x]": ".dilated_kernel_size: " + WRONG_SIZE.format("[17, 'x']"),
        "dilated_kernel_size: {min: 3}": ".dilated_kernel_size: " + WRONG_SIZE.format("{'min': 3}"),
        "dilated_kernel_size: 17x17": ".dilated_kernel_size: " + WRONG_SIZE.format("'17x17'"),
        "kernel_count: Auto": ".kernel_count: " + WRONG_COUNT.format("'Auto'"),
        "kernel_count: 0": ".kernel_count: " + WRONG_COUNT.format("0"),
        "kernel_count: yes": ".kernel_count: " + WRONG_COUNT.format("True"),
        "kernel_count: 1.5": ".kernel_count: " + WRONG_COUNT.format("1.5"),
        "interpolation: cubic": ".interpolation: found 'cubic'; allowed is bilinear or triangle or gaussian",
        "dense_axes: [3]": ".dense_axes[0]: found 3; allowed is a list of spatial axes",
        "dense_axes: [true]": ".dense_axes[0]: found True; allowed is a list of spatial axes",
        "dense_axes: 0": ".dense_axes: found 0; allowed is a list of spatial axes",
        "match: []": ".match: found []; allowed is a mapping",
        "match: depthwise": ".match: found 'depthwise'; allowed is a mapping",
        "match: null": ".match: found None; allowed is a mapping",
        "match: {kernel_sise: 3}": ".match: unknown key 'kernel_sise' (did you mean 'kernel_size'?)",
        "match: {kernel_size: {mn: 3}}": ".match.kernel_size: unknown key 'mn' (did you mean 'min'?)",
        "match: {kind: depthwize}": ".match.kind: found 'depthwize'; allowed is depthwise, grouped, dense",
        "match: {kind: [dense, x]}": ".match.kind: found ['dense', 'x']; allowed is depthwise, grouped, dense",
        "match: {kind: []}": ".match.kind: found []",
        "match: {path: []}": ".match.path: found []",
        "match: {path: 3}": f".match.path: found 3; {A_GLOB}",
        "match: {path: [a, 3]}": f".match.path: found ['a', 3]; {A_GLOB}",
        "match: {stage: 3}": f".match.stage: found 3; {A_GLOB}",
        "match: {type: {}}": f".match.type: found {{}}; {A_GLOB}",
        "match: {dims: 4}": ".match.dims: found 4; allowed is 1, 2 or 3",
        "match: {dims: true}": ".match.dims: found True; allowed is 1, 2 or 3",
        "match: {kernel_size: {min: 7, max: 3}}": re.compile(".match.kernel_size: .*min 7 is above max 3"),
        "match: {in_channels: {min: 7, max: 3}}": re.compile(".match.in_channels: .*min 7 is above max 3"),
        "match: {kernel_size: {}}": re.compile(".match.kernel_size: .*min"),
        "match: {kernel_size: {min: true}}": ".match.kernel_size: found {'min': True}; allowed is a positive integer",
        "match: {stride: {min: 1}}": ".match.stride: found {'min': 1}; allowed is a positive integer",
        "match: {in_channels: many}": ".match.in_channels: found 'many'; allowed is a positive integer",
    }
)
def test_rules(refused_rules, given, says):
    refused_rules(in_rule(given), ["rules[0]", *says], alone=True)


@table(
    {
        DEPTHWISE: "no dilated size is stated, neither by an option nor by the rules",
        f"{DEPTHWISE}, dilated_kernel_size: [17]": "conv_dw: the size 17 is for 1-D, this convolution is 2-D",
        f"{DEPTHWISE}, dilated_kernel_size: 16": re.compile("window 16 .* use 15 or 17"),
        f"{DEPTHWISE}, dilated_kernel_size: [17, 9], dense_axes: [0]": "dense axis 0 must keep its size 7",
        f"{RULE}, dense_axes: [0, 1]": "all its axes are dense; nothing would be learnt",
        f"{RULE}, kernel_count: 900": "kernel count 900 is more than the 289 cells of its window",
        f"{RULE}}}, {{name: late, match: {{path: no*}}": "my.yaml: rule 'late' claims nothing: no convolution",
        f"{RULE}}}, {{match: {{kernel_size: 7}}": "my.yaml: rule 'rules[1]' claims nothing: earlier rules claim all",
    }
)
def test_rules_that_do_not_fit_the_model(refused_rules, given, says):
    refused_rules(in_rule(given), says)


@table(
    {
        "--dilated-size 9": "every rule states its own dilated_kernel_size, so the dilated size given has no effect",
        "--kernel-count 9": "every rule states its own kernel_count, so the kernel count given has no effect",
        "--interpolation gaussian": "every rule states its own interpolation, so the interpolation given has no effect",
    }
)
def test_options_that_all_rules_overrule(refused_rules, given, says):
    refused_rules(in_rule(f"{RULE}, kernel_count: 5, interpolation: bilinear"), ["my.yaml", *says], *given.split())


def test_strict_refuses_what_would_be_skipped(refused, accepted, tmp_path):
    (tmp_path / "my.yaml").write_text(in_rule("match: {kernel_size: {min: 3}}, dilated_kernel_size: 5"))
    accepted("resnet18", "--dry-run", *SMALL, "--rules", "my.yaml")
    refused("resnet18", "--strict", *SMALL, "--rules", "my.yaml", says=["conv1: window 5", "kernel 7", "use 7 or more"])


# --- Exit code 3


@table(
    {
        "test_vit": "nothing in the model matches rules 'conv3x3'; it has 1 dense 16x16",
        "torchvision:swin_t": "nothing in the model matches rules 'conv3x3'; it has 1 dense 4x4",
        "resnet18 --rules depthwise": re.compile("it has 16 dense 3x3, .*; rules 'conv3x3' would match 16"),
        f"{TINY} --rules dense3x3": re.compile("it has 9 depthwise 7x7, .*; rules 'depthwise' would match 9"),
    }
)
def test_models_in_which_nothing_matches(refused, given, says):
    refused(*given.split(), says=says, code=NOTHING_MATCHES)


@table(
    {
        "nn.Linear(2, 2)": "nothing in the model matches rules 'conv3x3'; it has no convolution at all",
        "nn.ConvTranspose2d(3, 8, 3)": "it has 1 ConvTranspose2d (transposed convolution)",
        "nn.Sequential(nn.Conv2d(3, 8, 3))": "it has 1 dense 3x3 in the stem",  # else, why does it not match?
    }
)
def test_own_models_in_which_nothing_matches(refused, tmp_path, given, says):
    (tmp_path / "mymodel.py").write_text(f"from torch import nn\ndef build(): return {given}")
    refused("mymodel:build", says=says, code=NOTHING_MATCHES)


@table(
    {
        "match: {path: no*}": "nothing in the model matches rules 'my.yaml'; it has 9 depthwise 7x7",
        "skip: why": re.compile("skip"),
    }
)
def test_rules_that_convert_nothing(refused_rules, given, says):
    refused_rules(in_rule(given), says, code=NOTHING_MATCHES)


def test_a_converted_model_is_not_converted_again(refused, accepted):
    accepted(TINY, *SMALL, "--output", "done")
    refused("local-dir:done", says=["the model is converted already: it has 9 DCLS layers"])


# --- --checkpoint

FIRST, LAST = "0.0.weight", "0.2.running_mean"  # of `build`, and the last is not converted


@pytest.fixture(scope="module")
def state():
    """Weights that are not those of any initialisation."""
    generator = torch.Generator().manual_seed(0)
    own = build().state_dict()
    return {name: torch.rand(tensor.shape, generator=generator).to(tensor.dtype) for name, tensor in own.items()}


class RunsCode:
    """A pickle of it makes a folder as soon as it is read."""

    def __reduce__(self):
        return os.mkdir, ("code_has_run",)


def write(content):
    return lambda _, path: path.write_bytes(content)


def save(content):
    """A torch file with what `content` makes of the state dict."""
    return lambda state, path: torch.save(content(state), path)


def save_old(content):
    return lambda state, path: torch.save(content(state), path, _use_new_zipfile_serialization=False)


def cut(save, keep):
    """The file's first bytes; `keep` of the whole."""

    def save_and_cut(state, path):
        save(state, path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])

    return save_and_cut


def changed(tensor):
    return save(lambda state: {**state, FIRST: tensor(state[FIRST])})


def holding_itself(_):
    content = {}
    content["model"] = content
    return content


NO_SAFETENSORS = "not a readable safetensors file"
NO_TORCH = re.compile(
    "is damaged( or holds more than tensors)?, or is no file of torch.save; it is read with weights_only=True, "
    r"so save its state dict alone \(\w+\)$"
)
NO_CODE = (
    "is damaged or holds more than tensors, or is no file of torch.save; it is read with weights_only=True, "
    "so save its state dict alone (UnpicklingError)"
)
NO_STATE = ", not a state dict (names to tensors)"
RANDOM = bytes(torch.randint(256, (1000,), generator=torch.Generator().manual_seed(0)).tolist())


@table(
    {
        "empty": (("c.pth", write(b"")), NO_TORCH),
        "random": (("c.pth", write(RANDOM)), NO_TORCH),
        "text": (("c.pth", write(b"hello world\n" * 20)), NO_TORCH),
        "zip of nothing": (("c.pth", write(b"PK\3\4" + RANDOM)), NO_TORCH),
        "half": (("c.pth", cut(save(dict), 0.5)), NO_TORCH),
        "end missing": (("c.pth", cut(save(dict), 0.999)), NO_TORCH),
        "half, old format": (("c.pth", cut(save_old(dict), 0.5)), NO_TORCH),
        "beginning, old format": (("c.pth", cut(save_old(dict), 0.0005)), NO_TORCH),
        "safetensors called torch": (("c.pth", save_file), NO_TORCH),
        "empty safetensors": (("c.safetensors", write(b"")), NO_SAFETENSORS),
        "random safetensors": (("c.safetensors", write(RANDOM)), NO_SAFETENSORS),
        "half safetensors": (("c.safetensors", cut(save_file, 0.5)), NO_SAFETENSORS),
        "torch called safetensors": (("c.safetensors", save(dict)), NO_SAFETENSORS),
        "safetensors of nothing": (("c.safetensors", lambda _, path: save_file({}, path)), "with nothing" + NO_STATE),
        "code": (("c.pth", save(lambda _: RunsCode())), NO_CODE),
        "code, old format": (("c.pth", save_old(lambda _: RunsCode())), NO_CODE),
        "code, plain pickle": (("c.pkl", write(pickle.dumps(RunsCode()))), NO_CODE),
        "code beside weights": (("c.pth", save(lambda state: {"model": state, "x": RunsCode()})), NO_CODE),
        "whole model": (("c.pth", save(lambda _: nn.Linear(2, 2))), NO_CODE),
        "tensor": (("c.pth", save(lambda _: torch.zeros(3))), "holds a Tensor" + NO_STATE),
        "list": (("c.pth", save(lambda _: [1, 2])), "holds a list" + NO_STATE),
        "None": (("c.pth", save(lambda _: None)), "holds a NoneType" + NO_STATE),
        "empty dict": (("c.pth", save(lambda _: {})), "holds a mapping with nothing" + NO_STATE),
        "no tensors": (("c.pth", save(lambda _: {"a": 1, "b": "c"})), "holds a mapping with a, b" + NO_STATE),
        "empty wrapper": (("c.pth", save(lambda _: {"model": {}})), "holds a mapping with model" + NO_STATE),
        "holds itself": (("c.pth", save(holding_itself)), "holds a mapping with model" + NO_STATE),
        "more than tensors": (("c.pth", save(lambda state: {**state, "epoch": 3})), "epoch"),  # which is at fault
        "names are numbers": (("c.pth", save(lambda _: {1: torch.zeros(2)})), f"lacks {FIRST}", "has 1 too many"),
        "one missing": (("c.pth", save(lambda s: {k: s[k] for k in s if k != FIRST})), f"the model: it lacks {FIRST}"),
        "one too many": (("c.pth", save(lambda state: {**state, "x": torch.zeros(1)})), "the model: it has x too many"),
        "name given twice": (("c.pth", save(lambda s: {**s, f"module.{FIRST}": s[FIRST] + 1})), f"module.{FIRST}"),
        "other shape": (
            ("c.pth", changed(lambda _: torch.zeros(3, 3))),
            f"{FIRST} has shape (3, 3), the model needs (64, 3, 3, 3)",
        ),
        "complex": (("c.pth", changed(lambda tensor: tensor.to(torch.complex64))), FIRST),
        "sparse": (("c.pth", changed(torch.Tensor.to_sparse)), FIRST),
        "without data": (("c.pth", changed(lambda tensor: tensor.to("meta"))), FIRST),
        "folder": (("c.pth", lambda _, path: path.mkdir()), re.compile("folder|not a file")),
        "pipe": (("c.pth", lambda _, path: os.mkfifo(path)), re.compile("not a file")),
    }
)
def test_checkpoints(refused, tmp_path, state, given, says):
    name, write_to = given
    write_to(state, tmp_path / name)
    refused(OWN, "--checkpoint", name, says=[f"checkpoint {name}: ", *says])


@pytest.mark.parametrize("write_to", [save(dict), save_old(dict), save_file], ids=["torch", "old torch", "safetensors"])
def test_damaged_checkpoints_are_read_or_refused(tmp_path, state, write_to):
    path = tmp_path / ("c.safetensors" if write_to is save_file else "c.pth")
    write_to({LAST: state[LAST]}, path)
    whole = path.read_bytes()
    generator = random.Random(0)
    raised = set()
    for _ in range(200):
        damaged = bytearray(whole[: generator.choice([len(whole), generator.randrange(len(whole))])])
        for _ in range(generator.randrange(4) if damaged else 0):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            read_weights(path)
        except Exception as error:
            raised.add(type(error))
    assert raised == {CheckpointError}


@table(
    {
        TINY: re.compile("lacks stem.0.weight, .* and has .*0.0.weight.* too many"),
        "torchvision:resnet18": re.compile("lacks conv1.weight, .* and has .*0.0.weight.* too many"),
    }
)
def test_checkpoints_of_another_model(refused, tmp_path, state, given, says):
    save_file(state, tmp_path / "c.safetensors")
    refused(given, *SMALL, "--checkpoint", "c.safetensors", says=["checkpoint c.safetensors: does not fit", *says])


def prefixed(prefix):
    return lambda state: {prefix + name: tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "write_to",
    [
        save(dict),
        save_old(dict),
        save(lambda state: {"state_dict": state, "epoch": 3}),
        save(lambda state: {"model": state, "epoch": 3}),
        save(lambda state: {"state_dict_ema": state, "state_dict": build().state_dict()}),  # the mean is preferred
        save(lambda state: {"state_dict": {}, "model": state}),
        save(lambda state: {"model": {"epoch": 3, "state_dict": state}}),
        save(prefixed("module.")),
        save(prefixed("_orig_mod.")),
        save(prefixed("module._orig_mod.")),
        save(lambda state: {"state_dict": {"model": prefixed("_orig_mod.module.")(state)}}),
    ],
)
def test_what_training_scripts_save_loads(accepted, tmp_path, state, write_to):
    write_to(state, tmp_path / "c.pth")
    accepted(OWN, "--checkpoint", "c.pth", "--output", "out", "-q")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    torch.testing.assert_close(saved[LAST], state[LAST], rtol=0, atol=0)


# --- --output


def files(*names):
    """Folders where the name ends with a slash, else files with something of the user's."""

    def make(folder):
        for name in names:
            path = folder / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text("the user's own")

    return make


def link(name, target):
    """A link; the folder `t` is there, for it to point to."""
    return lambda folder: ((folder / "t").mkdir(), (folder / name).symlink_to(target))


EXISTS = "already exists; --force replaces it, --output names another"
LEFT = "it is left as it is"
NEW = "name a new folder, not one that is there already"
THEIRS = ("o/README.md", "o/config.json", "o/model.safetensors")  # as of any other model


@table(
    {
        "default exists": ((files("build-dcls7/"), ""), f"output build-dcls7 {EXISTS}"),
        "folder": ((files("o/"), "--output o"), f"output o {EXISTS}"),
        "file": ((files("o"), "--output o"), f"output o {EXISTS}"),
        "file, force": ((files("o"), "--output o --force"), "output o is a file, not a folder", LEFT),
        "foreign": ((files("o/data.txt"), "--output o --force"), "output o holds 'data.txt'", LEFT),
        "foreign, hidden": ((files("o/.git/"), "--output o --force"), "output o holds '.git'", LEFT),
        "foreign beside ours": (
            (files("o/config.json", "o/my.md"), "--output o --force"),
            "output o holds 'my.md'",
            LEFT,
        ),
        "foreign README": ((files("o/README.md"), "--output o --force"), "output o", LEFT),
        "foreign model": ((files(*THEIRS), "--output o --force"), "output o", LEFT),
        "foreign under our name": ((files("o/README.md/thesis.tex"), "--output o --force"), "output o", LEFT),
        "link": ((link("o", "t"), "--output o"), f"output o {EXISTS}"),
        "link, force": ((link("o", "t"), "--output o --force"), "output o", "link", LEFT),
        "link to nothing": ((link("o", "x"), "--output o"), f"output o {EXISTS}"),
        "link to nothing, force": ((link("o", "x"), "--output o --force"), "output o", "link", LEFT),
        "parent a file": ((files("f"), "--output f/o"), "output f/o: ", "f is not a folder"),
        "grandparent a file": ((files("f"), "--output f/x/o"), "output f/x/o: ", "f is not a folder"),
        "parent a link to nothing": ((link("l", "x"), "--output l/o"), "output l/o"),
        "parent a link to itself": ((link("l", "l"), "--output l/o"), "output l/o"),
        "too long": ((files(), f"--output {TOO_LONG}"), f"output {TOO_LONG[:57]}...: ", "File name too long"),
        "too long for the partial one": ((files(), f"--output {'a' * 250}"), "output", "too long"),
        "no name": ((files(), "--output ''"), f"output .: {NEW}"),
        "here": ((files(), "--output ."), f"output .: {NEW}"),
        "root": ((files(), "--output /"), f"output /: {NEW}"),
        "device": ((files(), "--output /dev/null"), f"output /dev/null {EXISTS}"),
        "under a device": ((files(), "--output /dev/null/x"), "output /dev/null/x: /dev/null is not a folder"),
        "through nothing": ((files(), "--output x/.."), f"output x/..: {NEW}"),
    }
)
def test_outputs(refused, tmp_path, given, says):
    make, options = given
    make(tmp_path)
    refused(OWN, *shlex.split(options), says=says)


def test_the_empty_working_directory_is_no_output(refused, tmp_path):
    (tmp_path / "here").mkdir()
    refused(OWN, "--output", ".", "--force", cwd="here", says=[f"output .: {NEW}"])


def test_a_working_directory_that_is_gone(tmp_path, capfd, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    check_refusal(*run([TINY, *SMALL], capfd), says=["output"], expected=MISTAKE)


@pytest.fixture
def open_folder():
    """A folder that others may enter, unlike pytest's, but not write to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "shut").mkdir()
        for file in ("c.pth", "my.yaml", "shut/c.pth", "shut/my.yaml"):
            (folder / file).touch(mode=0)
        (folder / "shut").chmod(0)
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)
        (folder / "shut").chmod(0o755)


@contextlib.contextmanager
def as_nobody():
    """Without root's privileges, to whom every permission is granted."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


PERMISSION = re.compile("(?i)permission|not readable")


@table(
    {
        "": "output build-dcls7: no permission to write in",
        "--output out": "output out: no permission to write in",
        "--output a/b/out": "output a/b/out: no permission to write in",
        "--output shut/out": PERMISSION,
        "--output shut": PERMISSION,
        "--checkpoint c.pth": PERMISSION,
        "--checkpoint shut/c.pth": PERMISSION,
        "--rules my.yaml": PERMISSION,
        "--rules shut/my.yaml": PERMISSION,
    }
)
def test_no_permission(open_folder, capfd, monkeypatch, given, says):
    monkeypatch.chdir(open_folder)
    run([OWN, "--dilated-size", "16"], capfd)  # imports what nobody may not read
    with tempfile.TemporaryDirectory() as rules:  # nor need nobody be allowed to enter the checkout
        shutil.copytree(builtin_rules()["depthwise"].parent, rules, dirs_exist_ok=True)
        Path(rules).chmod(0o755)
        monkeypatch.setattr("dcls_convert.planning.rules._SHIPPED", Path(rules))
        with as_nobody():
            result = run([OWN, *given.split()], capfd)
    check_refusal(*result, says=[*given.split()[1:], *says], expected=MISTAKE)
    assert sorted(os.listdir(open_folder)) == ["c.pth", "my.yaml", "shut"]


# --- Trouble in the middle of writing

STOPPED = re.compile("^error: interrupted; nothing was left behind$")
OUTPUTS = pytest.mark.parametrize("output", ["out", "a/b/out", "old"])


@pytest.fixture
def _old_checkpoint(accepted):
    """There is one in "old" already, which must outlive what goes wrong."""
    accepted(OWN, "--output", "old", "-q")


def options_for(output):
    return [OWN, "--kernel-count", "3", "--output", output, *["--force"] * (output == "old")]


@OUTPUTS
@pytest.mark.usefixtures("_old_checkpoint")
def test_a_full_disk_leaves_nothing(refused, output):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes of one file; the weights have more
    try:
        refused(*options_for(output), says=[f"output {output} cannot be written", "File too large"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", ["config.json", "report.json", "README.md"])
def test_a_disk_that_is_full_in_the_end(refused, monkeypatch, name):
    write_text = Path.write_text

    def full(path, text, **options):
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    refused(OWN, "--output", "a/out", says=["output a/out cannot be written", "No space left", name])


def test_a_small_disk(refused, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip(f"cannot mount: {mount.stderr.decode().strip()}")
    try:
        refused(OWN, "--output", "disk/out", says=["output disk/out cannot be written", "No space left"])
    finally:
        subprocess.run(["umount", disk], check=True)


@OUTPUTS
@pytest.mark.usefixtures("_old_checkpoint")
def test_a_folder_that_cannot_take_its_name(refused, monkeypatch, output):
    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(dcls_convert.checkpoints.output, "_rename", fail)
    refused(*options_for(output), says=[f"output {output} cannot be written", "Input/output error"])


@OUTPUTS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.usefixtures("_old_checkpoint")
def test_a_signal_while_writing_leaves_nothing(refused, monkeypatch, number, output):
    def half(_, path, **__):
        path.write_bytes(b"half of the weights")
        signal.raise_signal(number)

    monkeypatch.setattr(dcls_convert.checkpoints.save, "save_file", half)
    refused(*options_for(output), says=[STOPPED], code=INTERRUPTED)


SLOW = f"""
import time, dcls_convert.checkpoints.save
{CONV}
def slow(tensors, path, **_):
    path.write_bytes(b"half of the weights")
    time.sleep(60)
dcls_convert.checkpoints.save.save_file = slow
def build(): return conv(3)
"""


def test_signals_to_the_process_leave_nothing(tmp_path):
    started = []
    for number in (signal.SIGINT, signal.SIGTERM):
        folder = tmp_path / number.name
        folder.mkdir()
        (folder / "mymodel.py").write_text(SLOW)
        command = [sys.executable, "-B", "-m", "dcls_convert", "mymodel:build", "--output", "a/out"]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append((number, folder, process))
    for number, folder, process in started:
        deadline = time.monotonic() + 60
        while not any(folder.rglob("model.safetensors")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
    ended = [(process.communicate(timeout=60), folder, process.returncode) for _, folder, process in started]
    for (out, err), folder, code in ended:
        assert list(snapshot(folder)) == ["mymodel.py"]
        check_refusal(code, out, err, says=[STOPPED], expected=INTERRUPTED)
