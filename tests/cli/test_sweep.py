"""`dcls-convert sweep`: rows agree with conversions."""

import json
import shlex

import pytest
from torch import nn

from ..command_line import NET, net, run

SMALL = ("--input-size", "3x32x32")
NARROW, MIXED, UNABLE = (f"{__name__}:{name}" for name in ("narrow", "mixed", "unable"))


def narrow():
    return net(size=3)


def mixed():
    """A network with kernels of size 7 and of size 3."""
    network = net()
    network.stages[1] = net(size=3).stages[1]
    return network


def unable():
    class Net(nn.Sequential):
        def forward(self, image):
            raise ValueError("no [image]")

    return Net(*narrow())


def sweep(*arguments, code=0):
    """Run a sweep; return its JSON, and stderr."""
    out, err = run("sweep", *arguments, *SMALL, "--json", code=code)
    return json.loads(out), err


def table(*arguments):
    return run("sweep", *arguments, *SMALL)[0]


def report_of(command, *arguments):
    """Run a row's command; return its JSON report."""
    program, *words = shlex.split(command)
    assert program == "dcls-convert"
    return json.loads(run(*words, *arguments, "--json")[0])


@pytest.mark.parametrize(
    "options",
    [
        "--sizes 9,11x7 --counts 5,12",
        "--sizes 9 --budgets 60%,100,150.5% --tie none --interpolation gaussian",
        "--sizes 7..9 --strict --rules depthwise --num-classes 5",
    ],
)
def test_rows_say_what_their_commands_do(options):
    result, _ = sweep(NET, *options.split())
    original, *rows = result["rows"]
    assert original["status"] == "original"
    for row in rows:
        report = report_of(row["command"], "--dry-run")
        assert row["status"] == "done"
        assert (row["params"], row["macs"]) == (report["params"]["after"], report["macs"]["after"])
        assert (original["params"], original["macs"]) == (
            report["params"]["before"],
            report["macs"]["before"],
        )
        assert row["elements"] == report["params"]["weights"]
        assert row["layers"] == len(report["layers"])


@pytest.mark.parametrize(
    ("model", "options", "index"),
    [
        (NARROW, "--sizes 3..9", 2),
        (MIXED, "", 1),
        (NARROW, "--sizes 5 --counts 1,3,5", 2),  # 5 would add parameters
    ],
)
def test_the_recommended_row_is_what_auto_takes(model, options, index):
    result, _ = sweep(model, *options.split())
    report = report_of(f"dcls-convert {model}", "--dry-run", *SMALL)
    assert result["choice"]["row"] == index
    windows = sorted(map(list, {tuple(layer["dilated_size"]) for layer in report["layers"]}))
    row = result["rows"][index]
    assert row["dilated_sizes"] == windows
    last_line = table(model, *options.split()).splitlines()[-1].strip()
    assert row["command"] == result["choice"]["command"] == last_line


def test_default_sizes_are_growths_if_kernels_differ():
    _, *rows = sweep(MIXED)[0]["rows"]
    assert [row["asked"]["size"] for row in rows] == [f"+{growth}" for growth in range(2, 20, 2)]


def test_what_does_not_fit_is_a_row_with_its_reason():
    result, _ = sweep(NET, "--sizes", "8,9,+3", "--budgets", "0.5%,100%")
    rows = {(row["asked"]["size"], row["asked"]["budget"]): row for row in result["rows"][1:]}
    fitting = [asked for asked, row in rows.items() if row["status"] == "done"]
    assert fitting == [(9, 100)]
    assert "must be odd as the kernel 7 is" in rows[8, 100]["reason"]
    assert " 8 does not fit: stages.0" in table(NET, "--sizes", "8..10..1")


def test_without_a_size_that_fits_the_rows_are_shown_and_it_is_a_mistake():
    result, err = sweep(NET, "--sizes", "8,10", code=2)
    assert (len(result["rows"]), result["choice"]["row"]) == (3, None)
    assert err.splitlines()[-1].startswith("error: no size fits; the first problem: stages.0")


def test_without_macs_the_rows_and_a_recommendation_stay():
    out, _ = run("sweep", UNABLE, "--sizes", "5")
    assert "MACs were not counted: no input size is known; give input_size" in out
    assert "> 5x5 " in out


def test_a_costly_conversion_suggests_a_sweep_of_the_same_network(tmp_path, monkeypatch):
    rules = tmp_path / "stage 0.yaml"
    rules.write_text("format: 1\nrules:\n- match: {stage: stages.0}\n")
    options = ("--input-size", "3x48x48", "--num-classes", "5", "--rules", rules, "--tie", "none")
    options += ("--model-kwargs", "size=5")
    arguments = (NET, "--dilated-size", 21, *options, "--dry-run")
    report = json.loads(run(*arguments, "--json")[0])
    monkeypatch.setenv("COLUMNS", "40")
    lines = run(*arguments)[0].splitlines()
    # On one line, however narrow the terminal is.
    (command,) = [line for line in lines if line.startswith("    dcls-convert sweep ")]
    program, *suggested = shlex.split(command)
    assert program == "dcls-convert"
    original, row = json.loads(run(*suggested, "--sizes", "21", "--json")[0])["rows"]
    assert original["macs"] == report["macs"]["before"]
    assert row["macs"] == report["macs"]["after"]
    assert original["params"] == report["params"]["before"]
    assert row["layers"] == len(report["layers"])
