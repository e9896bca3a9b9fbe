"""`dcls-convert sweep`: rows agree with conversions."""

import json
import shlex

import pytest
import torch
from torch import nn

from ..command_line import NET, net, run

SMALL = ("--input-size", "3x32x32")
NARROW, ODD_AND_EVEN, MIXED, UNABLE = (
    f"{__name__}:{name}" for name in ("narrow", "odd_and_even", "mixed", "unable")
)


def narrow():
    return net(size=3)


def odd_and_even():
    """A network with two kernels of size 3 and one of size 4."""
    convs = [nn.Conv2d(8, 8, size, padding=size // 2, groups=8) for size in (3, 3, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *convs)


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


def table(*arguments, code=0):
    return run("sweep", *arguments, *SMALL, code=code)[0]


def report_of(command, *arguments):
    """Run a row's command; return its JSON report."""
    program, *words = shlex.split(command)
    assert program == "dcls-convert"
    return json.loads(run(*words, *arguments, "--json")[0])


@pytest.mark.parametrize(
    "options",
    [
        ("--sizes", "7..11"),
        ("--sizes", "9,11x7", "--counts", "5,12"),
        (
            "--sizes",
            "9",
            "--budgets",
            "60%,100,150.5%",
            "--tie",
            "none",
            "--interpolation",
            "gaussian",
        ),
        ("--sizes", "7,9", "--strict", "--rules", "depthwise", "--num-classes", "5"),
        ("--sizes", "+2,+4", "--budgets", "100"),
    ],
)
def test_rows_say_what_their_commands_do(options):
    result, _ = sweep(NET, *options)
    original, *rows = result["rows"]
    assert original["status"] == "original"
    for row in rows:
        report = report_of(row["command"], "--dry-run")
        layers = report["layers"]
        assert row["status"] == "done"
        assert (row["params"], row["macs"]) == (report["params"]["after"], report["macs"]["after"])
        assert (original["params"], original["macs"]) == (
            report["params"]["before"],
            report["macs"]["before"],
        )
        assert row["elements"] == report["params"]["weights"]
        assert row["layers"] == len(layers)
        assert row["kernel_counts"] == sorted({layer["kernel_count"] for layer in layers})
        assert row["dilated_sizes"] == sorted(
            map(list, {tuple(layer["dilated_size"]) for layer in layers})
        )
        assert result["input_size"] == report["input_size"]
    last = table(NET, *options).splitlines()[-1]
    assert (
        last.strip() == result["choice"]["command"] == rows[result["choice"]["row"] - 1]["command"]
    )


def test_kernels_of_several_sizes_have_rows_by_growth():
    result, _ = sweep(MIXED)
    _, *rows = result["rows"]
    assert [row["asked"]["size"] for row in rows] == [f"+{growth}" for growth in range(2, 20, 2)]
    for row in rows:
        growth = int(row["asked"]["size"])
        assert row["dilated_sizes"] == [[3 + growth] * 2, [7 + growth] * 2]
        assert row["layers"] == 4
    chosen = rows[result["choice"]["row"] - 1]
    default = report_of(f"dcls-convert {MIXED}", "--dry-run", *SMALL)
    assert chosen["macs"] == default["macs"]["after"]
    report = report_of(chosen["command"], "--dry-run")
    assert chosen["macs"] == report["macs"]["after"]
    assert f"> {chosen['asked']['size']} (" in table(MIXED)
    same = [row["asked"]["size"] for row in sweep(NET)[0]["rows"][1:]]
    assert same == [*range(7, 25, 2)], "one kernel size: windows of that size, and larger ones"


def test_the_default_folder_of_a_growth_has_a_name_that_shells_take():
    out, _ = run(MIXED, "--dilated-size", "+4", *SMALL, "--quiet")
    assert out.strip() == "mixed-dcls-plus4"
    assert run(NARROW, "--dilated-size", "+4", *SMALL, "--quiet")[0].strip() == "narrow-dcls7"
    out, _ = run(MIXED, "--dilated-size", "+4", *SMALL, "--dry-run")
    assert "elements in 7x7..11x11 (+4): " in out


def test_a_note_says_if_a_range_stops_before_its_end():
    result, err = sweep(NET, "--sizes", "7..10")
    assert [row["asked"]["size"] for row in result["rows"][1:]] == [7, 9]
    assert "note: 7..10 stops at 9, as it grows by 2; 7..10..1 has all" in err
    for range_ in ("7..11", "7..12..4"):
        assert "note:" not in sweep(NET, "--sizes", range_)[1]


def test_what_does_not_fit_is_a_row_with_its_reason():
    result, _ = sweep(NET, "--sizes", "8..10..1")
    statuses = [row["status"] for row in result["rows"]]
    assert statuses == ["original", "does not fit", "done", "does not fit"]
    assert "must be odd as the kernel 7 is" in result["rows"][1]["reason"]
    out = table(NET, "--sizes", "8..10..1")
    assert "! 8 does not fit: stages.0" in out
    assert out.splitlines()[-1].strip() == (
        f"dcls-convert {NET} --dilated-size 9 --input-size 3x32x32"
    )


def test_without_a_size_that_fits_the_rows_are_shown_and_it_is_a_mistake():
    result, err = sweep(NET, "--sizes", "8,10", code=2)
    assert len(result["rows"]) == 3
    assert result["choice"]["row"] is None
    assert err.splitlines()[-1].startswith("error: no size fits; the first problem: stages.0")


def test_the_table_marks_what_the_json_says():
    options = (NARROW, "--sizes", "3..5..1", "--counts", "1,9")
    result, _ = sweep(*options)
    expected = []
    for index, row in enumerate(result["rows"]):
        if index == result["choice"]["row"]:
            expected.append(">")
        elif row["status"] == "does not fit":
            expected.append("!")
        else:
            expected.append(" ")
    lines = table(*options).split("\n\n")[1].splitlines()[2:]
    assert [line[0] for line in lines] == expected
    assert set(expected) == {">", "!", " "}
    for line, row in zip(lines, result["rows"], strict=True):
        if row["params"] is not None:
            assert f" {row['params']:,} " in line


def test_no_size_is_recommended_for_a_trained_network():
    torch.save(narrow().state_dict(), "weights.pth")
    options = (NARROW, "--sizes", "3,5,7", "--checkpoint", "weights.pth")
    result, _ = sweep(*options)
    assert result["trained"]
    assert (result["choice"]["row"], result["choice"]["command"]) == (None, None)
    out = table(*options)
    assert " No size is recommended: without further training, converting a trained" in out
    assert "dcls-convert " not in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--sizes", "abc"), "'abc' is not a list of sizes"),
        (("--sizes", "7..9..0"), "is not a list of sizes"),
        (("--sizes", "7..11..+4"), "'7..11..+4' is not a list of sizes"),
        (("--sizes", "23..7"), "runs backwards; give 7..23"),
        (("--sizes", "1..9999"), "has 5,000 values; 1,000 are allowed"),
        (("--sizes", "1..999", "--counts", "3,4,5"), "1,500 rows are asked for; 1,000 are allowed"),
        (("--sizes", "7", "--budgets", "0"), "is not a list of percentages"),
        (
            ("--sizes", "7", "--counts", "3", "--budgets", "50"),
            "--counts and --budgets exclude each other",
        ),
    ],
)
def test_mistakes_are_one_line(options, says):
    out, err = run("sweep", NET, *options, code=2)
    assert out == "" or json.loads(out)["exit_code"] == 2
    *others, last = err.splitlines()
    assert last.startswith("error: ")
    assert says in last
    assert not any(line.startswith("error: ") for line in others), err


def test_rows_that_replace_other_layers_say_how_many():
    heading, _, _, *rows = table(ODD_AND_EVEN, "--sizes", "4,5").split("\n\n")[1].splitlines()
    assert "Layers" in heading
    assert [row.split()[-5] for row in rows] == ["1", "2"]
    assert "Layers" not in table(NET, "--sizes", "7,9")


def test_a_model_that_does_not_run_has_rows_without_macs_and_no_row_to_take():
    out, _ = run("sweep", UNABLE, "--sizes", "5")
    assert "MACs were not counted: the model does not run on the meta device" in out
    assert out.splitlines()[-1] == " No size is recommended: MACs are not known."


def test_rules_that_state_all_sizes_leave_none_to_compare(tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("format: 1\nrules:\n- dilated_size: 9\n")
    for sizes in ((), ("--sizes", "9,11")):
        _, err = run("sweep", NET, *SMALL, "--rules", rules, *sizes, code=2)
        assert err.splitlines()[-1] == (
            f"error: {rules}: every rule states its own dilated_size, so the option has no effect; "
            "omit it in a rule that should use the option"
        )


def test_a_costly_conversion_suggests_a_sweep_of_the_same_network(tmp_path, monkeypatch):
    rules = tmp_path / "stage 0.yaml"
    rules.write_text("format: 1\nrules:\n- match: {stage: stages.0}\n")
    options = ("--input-size", "3x48x48", "--num-classes", "5", "--rules", rules, "--tie", "none")
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
