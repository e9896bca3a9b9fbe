"""`dcls-convert sweep`: rows agree with conversions, even if some of them fail."""

import csv
import io
import itertools
import json
import shlex

import pytest
import torch
from torch import nn

from dcls_convert import convert_, fold_to_dense_
from dcls_convert.choosing import make_sweep, timing_rounds
from dcls_convert.choosing.recommendation import ERROR_TOLERANCE

from ..command_line import NET, net, run
from .trained import write_trained

SMALL = ("--input-size", "3x32x32")
NARROW, ODD_AND_EVEN, MIXED, UNABLE = (
    f"{__name__}:{name}" for name in ("narrow", "odd_and_even", "mixed", "unable")
)


def narrow():
    return net(size=3)


def odd_and_even():
    """A network with two kernels of size 3 and one of size 4."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 1), *[nn.Conv2d(8, 8, size, groups=8) for size in (3, 3, 4)]
    )


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
        ("--sizes", "7,9", "--scope", "stage", "--rules", "depthwise", "--num-classes", "5"),
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


def test_folded_bytes_are_those_of_the_folded_state_dict():
    for row in sweep(NET, "--sizes", "9,11")[0]["rows"]:
        model = net()
        if row["asked"]:
            convert_(model, dilated_size=row["asked"]["size"], init="random")
            fold_to_dense_(model)
        assert row["folded_bytes"] == sum(tensor.nbytes for tensor in model.state_dict().values())


def fail_at(monkeypatch, size, error):
    """Make planning of this size raise the error."""
    resolve = make_sweep.resolve

    def failing(loaded, options):
        if options.dilated_size == size:
            raise error
        return resolve(loaded, options)

    monkeypatch.setattr(make_sweep, "resolve", failing)


def test_what_does_not_fit_or_fails_is_a_row_with_its_reason(monkeypatch):
    fail_at(monkeypatch, 11, RuntimeError("something [broke]\nhere"))
    result, _ = sweep(NET, "--sizes", "8..11..1")
    assert [row["status"] for row in result["rows"]] == [
        "original",
        "does not fit",
        "done",
        "does not fit",
        "failed",
    ]
    assert "must be odd as the kernel 7 is" in result["rows"][1]["reason"]
    assert result["rows"][4]["reason"] == "planning: RuntimeError: something [broke] here"
    out = table(NET, "--sizes", "8..11..1")
    assert "! 11 failed: planning: RuntimeError: something [broke] here" in out
    assert (
        out.splitlines()[-1].strip() == f"dcls-convert {NET} --input-size 3x32x32 --dilated-size 9"
    )


def test_without_a_row_that_fits_the_rows_are_shown_and_it_is_a_mistake():
    result, err = sweep(NET, "--sizes", "8,10", code=2)
    assert len(result["rows"]) == 3
    assert result["choice"]["row"] is None
    assert err.splitlines()[-1].startswith(
        "error: no row was finished; the first problem: stages.0"
    )


def test_without_a_row_the_first_one_that_failed_says_why(monkeypatch):
    fail_at(monkeypatch, 9, MemoryError("no room"))
    _, err = sweep(NET, "--sizes", "8,9,10", code=2)
    assert err.splitlines()[-1].endswith("the first problem: planning: MemoryError: no room")


def test_an_interrupt_keeps_the_rows_so_far(monkeypatch):
    fail_at(monkeypatch, 11, KeyboardInterrupt())
    result, err = sweep(NET, "--sizes", "7..15", code=130)
    assert result["interrupted"]
    assert [row["asked"] and row["asked"]["size"] for row in result["rows"]] == [None, 7, 9]
    assert err.splitlines()[-1] == "error: interrupted"
    assert result["choice"]["row"] is None
    out = table(NET, "--sizes", "7..15", code=130)
    assert "Interrupted" in out
    assert out.splitlines()[-1] == " No size is recommended: only 2 of 5 rows were finished."


def test_an_interrupt_keeps_the_times_so_far(monkeypatch):
    measure = timing_rounds.forward_and_step_ms
    calls = itertools.count(1)

    def interrupted(model, images, *, amp):
        if next(calls) == 8:
            raise KeyboardInterrupt
        return measure(model, images, amp=amp)

    monkeypatch.setattr(timing_rounds, "forward_and_step_ms", interrupted)
    result, _ = sweep(NARROW, "--sizes", "5,7", "--time", "--seconds", 1, code=130)
    assert result["choice"]["why"] == "only 0 of 2 rows were finished", "a time needs three rounds"
    assert [row["forward_ms"]["runs"] for row in result["rows"]] == [2, 1, 1]
    assert [row["step_ms"]["runs"] for row in result["rows"]] == [2, 1, 1]


def test_times_are_measured_by_turns():
    result, err = sweep(
        NARROW, "--sizes", "5,7", "--time", "--seconds", 1, "--batch-size", 2, "--amp"
    )
    for row in result["rows"]:
        for part in (row["forward_ms"], row["step_ms"]):
            assert 0 < part["first_quartile"] <= part["median"] <= part["third_quartile"]
            assert part["runs"] >= 3
    assert result["timing"] == {
        "device": "cpu",
        "batch": 2,
        "seconds": 1,
        "amp": True,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    assert "timing, round 3" in err


def test_json_csv_and_the_table_agree():
    """9 elements reproduce the 9 cells of a kernel. 16 have the same error and more parameters, so
    their row is dominated.
    """
    torch.save(narrow().state_dict(), "weights.pth")
    options = (NARROW, "--sizes", "4..5..1", "--counts", "1,9,16", "--checkpoint", "weights.pth")
    result, _ = sweep(*options)
    lines = list(csv.DictReader(io.StringIO(table(*options, "--csv"))))
    assert len(lines) == len(result["rows"])
    for index, (line, row) in enumerate(zip(lines, result["rows"], strict=True)):
        same = "status layers elements params macs folded_bytes kernel_error output_error images"
        for name in (*same.split(), "same_top1", "reason", "command", "dominated"):
            assert line[name] == ("" if row[name] is None else str(row[name])), name
        assert line["kernel_counts"] == " ".join(map(str, row["kernel_counts"]))
        assert line["taken"] == str(index == result["choice"]["row"])
    expected = []
    for index, row in enumerate(result["rows"]):
        if index == result["choice"]["row"]:
            expected.append(">")
        elif row["dominated"]:
            expected.append("-")
        elif row["status"] == "does not fit":
            expected.append("!")
        else:
            assert row["status"] in ("done", "original")
            expected.append(" ")
    assert [line[0] for line in table(*options).split("\n\n")[1].splitlines()[2:]] == expected
    assert set(expected) == {">", "-", "!", " "}


def test_errors_are_those_of_the_conversions(tmp_path):
    write_trained(tmp_path, narrow(), images=6)
    weights = ("--checkpoint", "weights.safetensors", "--scope", "model")
    trained = (*weights, "--calibrate", "images", "--mean", "0.5,0.4,0.3", "--std", "0.25")
    result, _ = sweep(NARROW, "--sizes", "5", "--budgets", "30%,100%", *trained, "--slower", "1000")
    for index, row in enumerate(result["rows"][1:]):
        outcome = report_of(row["command"], "--output", tmp_path / str(index))["outcome"]
        assert outcome.pop("shifted")["kl"] > 0
        assert {name: row[name] for name in outcome} == outcome
        assert row["images"] == 5  # one image, with its corners
    least = min(row["output_error"] for row in result["rows"][1:])
    assert result["rows"][result["choice"]["row"]]["output_error"] <= least + ERROR_TOLERANCE
    assert (
        f"the least error of outputs for images held out ({least:.3f};" in result["choice"]["why"]
    )


def test_no_larger_window_is_recommended_for_a_trained_network_that_gains_nothing():
    torch.save(narrow().state_dict(), "weights.pth")
    options = (NARROW, "--sizes", "3,5,7", "--checkpoint", "weights.pth")
    result, _ = sweep(*options)
    assert (result["choice"]["row"], result["choice"]["command"]) == (None, None)
    out = table(*options)
    last = " No size is recommended: without training, no row gains anything"
    assert out.splitlines()[-1].startswith(last)
    assert "Without further training, converting a trained network gains nothing" in out


def test_a_picture_of_the_rows():
    for suffix, begins in {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}.items():
        sweep(NET, "--sizes", "7..11", "--picture", f"front.{suffix}")
        with open(f"front.{suffix}", "rb") as file:
            assert file.read(len(begins)) == begins
    with open("front.svg") as file:
        text = file.read()
    assert all(part in text for part in ("7x7: 24", "11x11: 24", "original", "MACs"))
    assert (
        "already exists" in run("sweep", NET, "--sizes", "7", "--picture", "front.svg", code=2)[1]
    )
    sweep(NET, "--sizes", "7", "--picture", "front.svg", "--force")


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
        (("--sizes", "7", "--counts", "3", "--scope", "stage"), "--counts states the counts"),
        (("--sizes", "7", "--device", "cuda"), "--device is for --time"),
        (("--sizes", "7", "--json", "--csv"), "--json and --csv exclude each other"),
        (("--sizes", "7", "--picture", "front.gif"), "must end in .png, .svg, .pdf"),
        (("--sizes", "7", "--force"), "--force has no effect without --picture"),
        (("--sizes", "7", "--time", "--device", "abc"), "device abc: torch cannot use it here"),
        (("--sizes", "7", "--time", "--device", "meta"), "device meta computes nothing"),
    ],
)
def test_mistakes_are_one_line(options, says):
    out, err = run("sweep", NET, *options, code=2)
    assert out == ""
    *others, last = err.splitlines()
    assert last.startswith("error: ")
    assert says in last
    assert not any(line.startswith("error: ") for line in others), err


def test_rows_that_replace_other_layers_say_how_many():
    heading, _, _, *rows = table(ODD_AND_EVEN, "--sizes", "4,5").split("\n\n")[1].splitlines()
    assert "Layers" in heading
    assert [row.split()[-6] for row in rows] == ["1", "2"]
    assert "Layers" not in table(NET, "--sizes", "7,9")


def test_a_model_that_does_not_run_has_rows_without_macs_and_no_row_to_take():
    out, _ = run("sweep", UNABLE, "--sizes", "5")
    assert "MACs were not counted: the model does not run on the meta device" in out
    assert out.splitlines()[-1] == " No size is recommended: neither MACs nor times are known."
    out, err = run("sweep", UNABLE, "--sizes", "5", "--time", "--json", code=2)
    rows = json.loads(out)["rows"]
    assert [row["reason"] for row in rows] == ["timing: ValueError: no [image]"] * 2
    assert rows[1]["params"]
    assert err.splitlines()[-1] == (
        "error: no row was finished; the first problem: timing: ValueError: no [image]"
    )


def test_rules_that_state_all_sizes_leave_none_to_compare(tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("format: 1\nrules:\n- dilated_size: 9\n")
    for sizes in ((), ("--sizes", "9,11")):
        _, err = run("sweep", NET, *SMALL, "--rules", rules, *sizes, code=2)
        assert err.splitlines()[-1] == (
            f"error: {rules}: every rule states its own dilated_size, so no other has an effect; "
            "omit it in a rule that should take another"
        )


def test_a_costly_conversion_suggests_a_sweep_of_the_same_network(tmp_path):
    rules = tmp_path / "stage 0.yaml"
    rules.write_text("format: 1\nrules:\n- match: {stage: stages.0}\n")
    options = ("--input-size", "3x48x48", "--num-classes", "5", "--rules", rules, "--tie", "none")
    arguments = (NET, "--dilated-size", 21, *options, "--dry-run")
    report = json.loads(run(*arguments, "--json")[0])
    words = " ".join(run(*arguments)[0].split()).split(" times the MACs; cheaper sizes: ")[1]
    command = words[: words.index(" Stage ")]
    program, *suggested = shlex.split(command)
    assert program == "dcls-convert"
    original, row = json.loads(run(*suggested, "--sizes", "21", "--json")[0])["rows"]
    assert original["macs"] == report["macs"]["before"]
    assert row["macs"] == report["macs"]["after"]
    assert original["params"] == report["params"]["before"]
    assert row["layers"] == len(report["layers"])
