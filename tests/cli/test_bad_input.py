"""Whatever is wrong with what `dcls-convert` is given ends in one line, the documented exit code, and nothing written.

A row of the tables is one kind of mistake: what is given, and what the line must say about it.
"""

import json
import os
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
from safetensors.torch import save_file
from torch import nn

from dcls_convert.errors import CheckpointError, shown
from dcls_convert.networks.weights import read_weights
from dcls_convert.planning.rules import builtin_rules

from ..command_line import run
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


def snapshot(folder="."):
    """Everything in the folder, hidden files too, with its mode and its content or where the link points."""
    content = lambda path: path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes()  # noqa: E731
    return {path: (path.lstat().st_mode, content(path)) for path in Path(folder).rglob("*")}


def check_line(out, err, says):
    """One line of error, the last, that says all of `says` (texts or patterns); nothing on stdout."""
    assert (out, "Traceback" in err) == ("", False)
    lines = err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], f"not one line of error: {err!r}"
    for part in says:
        assert re.search(part if isinstance(part, re.Pattern) else re.escape(part), lines[-1]), f"{part!r}: {err}"
    return lines[-1]


def refused(*arguments, says, code=MISTAKE):
    """`dcls-convert` refuses and leaves everything as it is; the line that it says."""
    before = snapshot()
    out, err = run(*arguments, code=code)
    assert snapshot() == before, err
    return check_line(out, err, says)


# --- The command line itself


@table(
    {
        "--dry-run": "Missing argument 'MODEL'",
        f"{TINY} --nope": "No such option: --nope",
        f"{TINY} --dilate-size 17": re.compile("No such option: --dilate-size.*--dilated-size"),
        f"{TINY} --dilated-size": "'--dilated-size' requires an argument",
        f"{TINY} --plan nowhere": "nowhere: is not a folder",
        "no_model --pretrained --calibrate nowhere": "calibration images nowhere: there is no such folder",
        f"{TINY} extra": re.compile("unexpected extra argument.*extra"),
        "rules nope": "No such command 'nope'",
        "rules show": "Missing argument",
        "rules show nope": "rules 'nope' are neither a file nor one of conv3x3, dense3x3",
        "inspect . --json --plan": "--plan and --json exclude each other",
    }
)
def test_usage(given, says):
    refused(*given.split(), says=says)


@pytest.mark.parametrize("given", [[], ["rules"]], ids=["dcls-convert", "dcls-convert rules"])
def test_nothing_at_all_shows_the_help(given):
    out, err = run(*given)
    assert (err, "Usage: " in out) == ("", True)


# --- MODEL


@table(
    {
        "misspelt": ("convnext_ato", "'convnext_ato'", "did you mean 'convnext_atto'"),
        "not ASCII": ("é", "no model 'é'"),
        "newline": ("convnext_atto\n", r"no model 'convnext_atto\n'", "did you mean 'convnext_atto'"),
        "empty": ("", "model '' has no name"),
        "function alone": (":build", ":build", "mpty module name"),
        "unknown in timm": ("timm:resnet81", "no model 'timm:resnet81'", "did you mean 'resnet"),
        "unknown tag": ("resnet18.nope", "no weights tagged 'nope'", "a1_in1k", "tv_in1k"),
        "unknown in torchvision": (
            "torchvision:resnet81",
            "no model 'torchvision:resnet81'",
            "did you mean 'resnet18'",
        ),
        "our entry": ("dcls_convert", re.compile("no model 'dcls_convert'|not a model by itself")),
        "no module": ("nomodule_x:build", "module 'nomodule_x' cannot be imported", "No module named"),
        "relative module": (".rel:build", ".rel:build", "relative import"),
        "no attribute": ("os:nothing", "module 'os' has no function 'nothing'"),
        "function for no model": ("os:getcwd", "gives a str, not a torch.nn.Module"),
        "local-dir gone": ("local-dir:nowhere", "local-dir:nowhere: nowhere/config.json cannot be read: No such file"),
        "hub, not cached": ("hf-hub:timm/nope-nope", "hf-hub:timm/nope-nope", "not in the local cache"),
        "hub, no repository": ("hf-hub:a/b/c", "hf-hub:a/b/c", "'namespace/repo_name'"),
    }
)
def test_model_names(given, says):
    refused(given, "--dry-run", says=says)


CONV = """from torch import nn
def conv(size, **k):
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 1, **k), nn.Conv2d(8, 8, size, **k)))
"""  # the first takes the image, which makes it the stem


@table(
    {
        "syntax error": ("def build(:", "mymodel:build", "SyntaxError", "mymodel.py, line 1"),
        "fails on import": ("1 / 0", "ZeroDivisionError: division by zero"),
        "several lines": ("def build(): raise ValueError('first\\nsecond')", "ValueError: first second"),
        "endless recursion": ("def build(): return build()", "cannot be built: RecursionError"),
        "leaves the program": ("import sys\ndef build(): sys.exit(7)", "mymodel:build", "SystemExit"),
        "gives a class": (f"{CONV}def build(): return nn.Linear", "gives a type, not a torch.nn.Module"),
        "gives no weights": (f"{CONV}def build(): return conv(3, device='meta')", "mymodel:build", "meta"),
        "gives other models": (
            f"{CONV}sizes = [3, 5]\ndef build(): return conv(sizes.pop(0))",
            "kernel_size is (5, 5), the plan has (3, 3)",
        ),
    }
)
def test_models_of_the_users_own(given, says):
    Path("mymodel.py").write_text(given)
    refused("mymodel:build", says=says)


@table(
    {
        "--num-classes 3": "unexpected keyword argument 'num_classes'",
        "--in-chans 3": "unexpected keyword argument 'in_chans'",
        "--pretrained": "--pretrained is for timm and torchvision",
        "--input-size 4x9x9": re.compile("input size 4x9x9: .*hannel"),
    }
)
def test_options_that_the_users_model_does_not_take(given, says):
    refused(OWN, *given.split(), says=says)


@table(
    {
        "no config": (None, "local-dir:folder", "config.json"),
        "empty": ("", "local-dir:folder", "JSON", "line 1 column 1"),
        "no architecture": (
            "{}",
            "local-dir:folder: folder/config.json names no architecture; it is not a config of timm",
        ),
        "unknown architecture": ('{"architecture": "nope"}', "local-dir:folder", "nope"),
        "our architecture": ('{"architecture": "dcls_convert"}', '"dcls_convert" is not a model by itself'),
        "no weights": ('{"architecture": "test_convnext"}', "pretrained weights cannot be had", "folder"),
    }
)
def test_local_folders(given, says):
    Path("folder").mkdir()
    if given is not None:
        Path("folder/config.json").write_text(given)
    refused("local-dir:folder", "--pretrained", says=says)


@table(
    {
        "hf-hub:timm/nope-nope": "hf-hub:timm/nope-nope: cannot be built",
        f"{TINY} --pretrained": f"timm:{TINY}: its pretrained weights cannot be had",
        "torchvision:resnet18 --pretrained": "torchvision:resnet18: its pretrained weights cannot be had",
        "torchvision:resnet18 --pretrained --num-classes 3": "fixed number of classes",
        "torchvision:resnet18 --in-chans 4": "fixed number of input channels",
    }
)
def test_weights_that_cannot_be_had(monkeypatch, tmp_path_factory, given, says):
    def offline(*_, **__):
        raise URLError("no network in this test")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    refused(*given.split(), says=says)


def test_what_torch_says_of_a_download_is_not_in_the_results(monkeypatch, tmp_path_factory):
    name = "shufflenet_v2_x0_5"

    def download(_, path, *__, **___):
        torch.save(torchvision.models.get_model(name).state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path_factory.mktemp("torch")))
    out, err = run(f"torchvision:{name}", "--pretrained", "--json", "--output", "out")
    assert isinstance(json.loads(out), dict)
    assert "Downloading" in err


# --- Options, in themselves and for this model


NO_SIZE = "is not a size: give an integer from 1 to 9999 such as 17, or sides such as 17x9"
NO_INPUT = "is not an input size: give channels and sides from 1 to 9999, such as 3x224x224"
NO_COUNT = "is not an integer from 1 to 1000000000, or auto"
NO_PERCENT = "is not a number from 0.0001 to 100000"
NO_SEED = f"is not an integer from 0 to {2**63 - 1}"
NEITHER = ["", "x", "1_0", " 17 ", "+17", "\u0663", "\uff11\uff17", "17.0.0", "-1", "1e3", "nan", "9" * 20, "9" * 5000]


@pytest.mark.parametrize(
    ("option", "values", "allowed"),
    [
        ("--dilated-size", ["0", "17x", "x17", "17x0", "17.0", "17*17", "17x17x17x17", "10000", "17x10000"], NO_SIZE),
        ("--input-size", ["3", "3x", "0x9x9", "3x-1x9", "3x1x1x1x1", "3,9,9", "3 x 9 x 9", "3x10000x9"], NO_INPUT),
        ("--kernel-count", ["0", "1.5", "AUTO", "auto ", "1000000001"], NO_COUNT),
        ("--budget", ["0", "0.00001", "100%%", "%", "snan", "100001"], NO_PERCENT),
        ("--seed", ["1.5", str(2**63)], NO_SEED),
        ("--num-classes", ["1.5"], "is not an integer from 0 to 1000000000"),
        ("--in-chans", ["0"], "is not an integer from 1 to 1000000000"),
    ],
)
def test_numbers_that_are_none(option, values, allowed):
    for value in [*NEITHER, *values]:
        refused(TINY, option, value, says=[f"Invalid value for '{option}': '{shown(value)}' {allowed}"])


@table(
    {
        "--dilated-size 16": re.compile(r"blocks\.0\.conv_dw: window 16 .* must be odd as the kernel 7 is.* 15 or 17"),
        "--dilated-size 5": re.compile("window 5 .* is smaller than the kernel 7 .* use 7 or more"),
        "--dilated-size 17x17x17": "conv_dw: the size 17x17x17 is for 3-D, this convolution is 2-D",
        "--kernel-count 290": "count 290 is more than the 289 cells of its window; use 289 or fewer",
        "--budget 1": re.compile(r"a budget of 1 % .*; the smallest budget that does is [\d.]+ %"),
        "--scope nope": re.compile("'--scope'.* 'nope' is not one of 'model', 'stage', 'layer', 'error'"),
        "--input-size 4x64x64": re.compile("input size 4x64x64: .*hannel"),
        "--input-size 3x1x1": "input size 3x1x1: the model does not run on the meta device at (3, 1, 1): ",
        "--checkpoint gone.pth": "checkpoint gone.pth: there is no such file",
        "--checkpoint /": "checkpoint /: is not a file",
        "checkpoint too long": (
            f"--checkpoint {TOO_LONG}",
            f"checkpoint {TOO_LONG[:29]}...{TOO_LONG[:28]}: File name too long",
        ),
        # options in conflict
        "--plan x --budget 90": "--plan carries out a plan as it is",
        "--pretrained --checkpoint x": "--pretrained and --checkpoint exclude each other",
        "--dry-run --force": "--force has no effect with --dry-run",
        "--dry-run --output x": "--output has no effect with --dry-run",
        "-q -v": "--quiet and --verbose exclude each other",
        "--json -v": "--json and --verbose exclude each other",
        "-q --dry-run": "--quiet with --dry-run would print nothing",
        "--init largest": "--init largest needs trained kernels: --pretrained or --checkpoint",
        "--init exact --kernel-count 9": "an exact start takes an element for each cell of the old kernels: leave",
        "--init exact --interpolation gaussian": "gaussian interpolation spreads an element over several cells",
        "--init exact --positions uniform": "--positions is for random positions, --init auto or exact keeps",
        "--calibrate .": "--calibrate is for --init fit, with --pretrained or --checkpoint",
        "--positions uniform --pretrained": re.compile("--positions is for random positions.*use --init random"),
        "--kernel-count 3 --budget 50": "--kernel-count states the count, so --budget and --scope would have no effect",
    }
)
def test_options(given, says):
    refused(TINY, *(SMALL if "--input-size" not in given else ()), *shlex.split(given), says=says)


@table(
    {
        "--dilated-size 16": re.compile(r"use (\d+) or (\d+)"),
        "--dilated-size 5": re.compile(r"use (\d+) or more"),
        "--kernel-count 290": re.compile(r"use (\d+) or fewer"),
    }
)
def test_what_a_message_advises_works(given, says):
    call = (TINY, "--dry-run", *SMALL)
    for value in says[0].search(refused(*call, *given.split(), says=says)).groups():
        run(*call, given.split()[0], value)


# --- Rule files

DEPTHWISE = "match: {kind: depthwise}"
RULE = f"{DEPTHWISE}, dilated_kernel_size: 17"
A_MAPPING = ", but must be a mapping with format, description, defaults, rules"


def in_rule(text):
    return f"format: 1\nrules: [{{{text}}}]"


@table(
    {
        "empty": ("", f"my.yaml: is empty{A_MAPPING}"),
        "NUL": ("format: 1\n\0", "not valid YAML", "#x0000"),
        "too deep": ("[" * 600, "not valid YAML"),
        "too many digits": (f"format: {'1' * 5000}", "not valid YAML"),
        "Python tag": ("format: !!python/object/apply:os.mkdir [code_has_run]", "line 1", "not valid YAML", "os.mkdir"),
        "UTF-16": (in_rule(RULE).encode("utf-16"), "UTF-8"),
        "duplicate key": ("format: 1\nformat: 1\nrules: [{}]", "line 2", "key 'format' stands twice"),
        "second rule": ("format: 1\nrules: [{}, {nam: x}]", "rules[1]: unknown key 'nam' (did you mean 'name'?)"),
        "value": (in_rule("dilated_kernel_size: big"), "rules[0].dilated_kernel_size: found 'big'; allowed is"),
    }
)
def test_rule_files(given, says):
    Path("my.yaml").write_bytes(given if isinstance(given, bytes) else given.encode())
    refused("rules", "check", "my.yaml", says=["my.yaml:", *says])
    refused(TINY, *SMALL, "--rules", "my.yaml", says=says)


@table(
    {
        DEPTHWISE: "no dilated size is stated, neither by an option nor by the rules",
        f"{DEPTHWISE}, dilated_kernel_size: [17]": "conv_dw: the size 17 is for 1-D, this convolution is 2-D",
        f"{RULE}}}, {{name: late, match: {{path: no*}}": "my.yaml: rule 'late' claims nothing: no convolution",
        f"{RULE}}}, {{match: {{kernel_size: 7}}": "my.yaml: rule 'rules[1]' claims nothing: earlier rules claim all",
    }
)
def test_rules_that_do_not_fit_the_model(given, says):
    Path("my.yaml").write_text(in_rule(given))
    refused(TINY, *SMALL, "--rules", "my.yaml", says=says)
    if given != DEPTHWISE:  # its size can be stated later
        refused("rules", "check", "my.yaml", "--model", TINY, says=says)


def test_strict_refuses_what_would_be_skipped():
    Path("my.yaml").write_text(in_rule("match: {kernel_size: {min: 3}}, dilated_kernel_size: 5"))
    run("resnet18", "--dry-run", *SMALL, "--rules", "my.yaml")
    refused("resnet18", "--strict", *SMALL, "--rules", "my.yaml", says=["conv1: window 5", "kernel 7", "use 7 or more"])


# --- Exit code 3


@table(
    {
        "test_vit": "nothing in the model matches rules 'conv3x3'; it has 1 dense 16x16",
        "resnet18 --rules depthwise": re.compile("it has 16 dense 3x3, .*; rules 'conv3x3' would match 16"),
        f"{TINY} --rules dense3x3": re.compile("it has 9 depthwise 7x7, .*; rules 'depthwise' would match 9"),
    }
)
def test_models_in_which_nothing_matches(given, says):
    refused(*given.split(), says=says, code=NOTHING_MATCHES)
    model, _, rules = given.partition(" --rules ")
    refused("rules", "check", rules or "conv3x3", "--model", model, says=says, code=NOTHING_MATCHES)


@table(
    {
        "nn.Linear(2, 2)": "nothing in the model matches rules 'conv3x3'; it has no convolution at all",
        "nn.ConvTranspose2d(3, 8, 3)": "it has 1 ConvTranspose2d (transposed convolution)",
        "nn.Sequential(nn.Conv2d(3, 8, 3))": "it has 1 dense 3x3 in the stem",  # else, why does it not match?
    }
)
def test_own_models_in_which_nothing_matches(given, says):
    Path("mymodel.py").write_text(f"from torch import nn\ndef build(): return {given}")
    refused("mymodel:build", says=says, code=NOTHING_MATCHES)


def test_a_converted_model_is_not_converted_again():
    run(TINY, *SMALL, "--output", "done")
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


def cut(save, keep):
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


@table(
    {
        "empty": (("c.pth", write(b"")), NO_TORCH),
        "safetensors called torch": (("c.pth", save_file), NO_TORCH),
        "half safetensors": (("c.safetensors", cut(save_file, 0.5)), NO_SAFETENSORS),
        "code": (("c.pth", save(lambda _: RunsCode())), NO_CODE),
        "tensor": (("c.pth", save(lambda _: torch.zeros(3))), "holds a Tensor" + NO_STATE),
        "holds itself": (("c.pth", save(holding_itself)), "holds a mapping with model" + NO_STATE),
        "more than tensors": (("c.pth", save(lambda state: {**state, "epoch": 3})), "epoch"),  # which is at fault
        "one missing": (("c.pth", save(lambda s: {k: s[k] for k in s if k != FIRST})), f"the model: it lacks {FIRST}"),
        "one too many": (("c.pth", save(lambda state: {**state, "x": torch.zeros(1)})), "the model: it has x too many"),
        "name given twice": (("c.pth", save(lambda s: {**s, f"module.{FIRST}": s[FIRST] + 1})), f"module.{FIRST}"),
        "other shape": (
            ("c.pth", changed(lambda _: torch.zeros(3, 3))),
            f"{FIRST} has shape (3, 3), the model needs (64, 3, 3, 3)",
        ),
        "complex": (("c.pth", changed(lambda tensor: tensor.to(torch.complex64))), FIRST),
        "without data": (("c.pth", changed(lambda tensor: tensor.to("meta"))), FIRST),
    }
)
def test_checkpoints(state, given, says):
    name, write_to = given
    write_to(state, Path(name))
    refused(OWN, "--checkpoint", name, says=[f"checkpoint {name}: ", *says])


@pytest.mark.parametrize("write_to", [save(dict), save_file], ids=["torch", "safetensors"])
def test_damaged_checkpoints_are_read_or_refused(state, write_to):
    path = Path("c.safetensors" if write_to is save_file else "c.pth")
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


def test_a_checkpoint_of_another_model(state):
    save_file(state, "c.safetensors")
    names = re.compile("lacks stem.0.weight, .* and has .*0.0.weight.* too many")
    refused(TINY, *SMALL, "--checkpoint", "c.safetensors", says=["checkpoint c.safetensors: does not fit", names])


# --- --output


def files(*names):
    """Folders where the name ends with a slash, else files with something of the user's."""

    def make():
        for name in names:
            path = Path(name)
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text("the user's own")

    return make


def link(name, target):
    """A link; the folder `t` is there, for it to point to."""
    return lambda: (Path("t").mkdir(), Path(name).symlink_to(target))


EXISTS = "already exists; --force replaces it, or name another"
LEFT = "it is left as it is"
NEW = "name a new folder, not one that is there already"


@table(
    {
        "default exists": ((files("build-dcls7/"), ""), f"output build-dcls7 {EXISTS}"),
        "folder": ((files("o/"), "--output o"), f"output o {EXISTS}"),
        "file, force": ((files("o"), "--output o --force"), "output o is a file, not a folder", LEFT),
        "foreign": ((files("o/data.txt"), "--output o --force"), "output o holds 'data.txt'", LEFT),
        "foreign under our name": ((files("o/README.md/thesis.tex"), "--output o --force"), "output o", LEFT),
        "link, force": ((link("o", "t"), "--output o --force"), "output o", "link", LEFT),
        "link to nothing": ((link("o", "x"), "--output o"), f"output o {EXISTS}"),
        "parent a file": ((files("f"), "--output f/o"), "output f/o: ", "f is not a folder"),
        "too long": (
            (files(), f"--output {TOO_LONG}"),
            f"output {TOO_LONG[:29]}...{TOO_LONG[:28]}: ",
            "File name too long",
        ),
        "too long for its partial": ((files(), f"--output {'é' * 119}"), "File name too long; 228 bytes are the most"),
        "no name": ((files(), "--output ''"), f"output .: {NEW}"),
        "under a device": ((files(), "--output /dev/null/x"), "output /dev/null/x: /dev/null is not a folder"),
    }
)
def test_outputs(given, says):
    make, options = given
    make()
    refused(OWN, *shlex.split(options), says=says)


def test_a_working_directory_that_is_gone(monkeypatch):
    Path("here").mkdir()
    monkeypatch.chdir("here")
    Path.cwd().rmdir()
    out, err = run(TINY, *SMALL, code=MISTAKE)
    check_line(out, err, ["output", "working directory"])
    assert "planning" not in err


@pytest.fixture
def as_nobody(monkeypatch):
    """In a folder that nobody may write to, without the privileges of root, who may do everything."""
    run(OWN, "--dilated-size", "16", code=MISTAKE)  # imports what nobody may not read
    with tempfile.TemporaryDirectory() as name:  # others may enter it, unlike pytest's and perhaps the checkout
        outer, folder = Path(name), Path(name, "here")
        shutil.copytree(builtin_rules()["depthwise"].parent, outer / "rules")
        monkeypatch.setattr("dcls_convert.files.SHIPPED_RULES", outer / "rules")
        (folder / "shut").mkdir(parents=True)
        for file in ("c.pth", "my.yaml", "shut"):
            (folder / file).touch()
            (folder / file).chmod(0)
        folder.chmod(0o555)
        outer.chmod(0o755)
        monkeypatch.chdir(folder)
        root = os.geteuid() == 0
        if root:
            os.setresuid(NOBODY, NOBODY, 0)
        yield
        if root:
            os.setresuid(0, 0, 0)
        assert sorted(os.listdir(folder)) == ["c.pth", "my.yaml", "shut"]
        folder.chmod(0o755)
        (folder / "shut").chmod(0o755)


PERMISSION = re.compile("(?i)permission|not readable")


@table(
    {
        "": "output build-dcls7: no permission to write in",
        "--output a/b/out": "output a/b/out: no permission to write in",
        "--output shut/out": PERMISSION,
        "--checkpoint c.pth": PERMISSION,
        "--rules my.yaml": PERMISSION,
        "--rules shut/my.yaml": PERMISSION,
    }
)
@pytest.mark.usefixtures("as_nobody")
def test_no_permission(given, says):
    check_line(*run(OWN, *given.split(), code=MISTAKE), [*given.split()[1:], *says])


# --- Trouble in the middle of writing

OUTPUTS = pytest.mark.parametrize("output", ["out", "a/b/out", "old"])


@pytest.fixture
def _old_checkpoint():
    """There is one in "old" already, which must outlive what goes wrong."""
    run(OWN, "--output", "old", "-q")


def options_for(model, output):
    return [model, "--kernel-count", "3", "--output", output, *["--force"] * (output == "old")]


@OUTPUTS
@pytest.mark.usefixtures("_old_checkpoint")
def test_a_full_disk_leaves_nothing(output):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))  # bytes of one file; the weights have more
    try:
        refused(*options_for(OWN, output), says=[f"output {output} cannot be written", "File too large"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Signalling(nn.Sequential):
    """A network that is interrupted when it runs on an image, which happens when its checkpoint is written."""

    def forward(self, x):
        if x.device.type == "cpu":
            print("running", file=sys.stderr, flush=True)
            signal.raise_signal(signal.Signals[os.environ["DCLS_TEST_SIGNAL"]])
        return super().forward(x)


def signalling():
    return Signalling(*build())


@OUTPUTS
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.usefixtures("_old_checkpoint")
def test_a_signal_while_writing_leaves_nothing(monkeypatch, name, output):
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's parent may ignore SIGINT
    monkeypatch.setenv("DCLS_TEST_SIGNAL", name)
    model = f"{__name__}:signalling"
    refused(*options_for(model, output), says=[re.compile("^error: interrupted$")], code=INTERRUPTED)


WAITING = """
import sys, time
from torch import nn

class Waiting(nn.Sequential):
    def forward(self, x):
        if x.device.type == "cpu":
            print("running", flush=True)
            time.sleep(60)
        return super().forward(x)

def build(): return Waiting(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3)))
"""
CHILD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # its parent may ignore SIGINT
from dcls_convert.cli.app import main
main(["mymodel:build", "--output", "a/out"])
"""


@pytest.mark.processes
def test_a_hail_of_signals_is_one_line_and_leaves_nothing():
    Path("mymodel.py").write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, "-B", "-c", CHILD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if line == "running\n":
            break
    while process.poll() is None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
        time.sleep(0.001)
    out, err = process.communicate(timeout=60)
    assert os.listdir() == ["mymodel.py"]
    assert process.returncode == INTERRUPTED, err
    check_line(out, err, ["interrupted"])
