"""`dcls-convert compare`: arms are comparable, interrupted runs continue, and the result is one
table.
"""

import json
import tarfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.compare.answer import Correction
from dcls_convert.compare.arms import Arm, make_arms, make_network
from dcls_convert.compare.settings import Settings, default_lr
from dcls_convert.compare.trainer import Trainer
from dcls_convert.conversion.request import ConversionRequest
from dcls_convert.networks.position_parameters import position_parameters
from dcls_convert.options import PlanOptions
from dcls_convert.tuning.distributed import accelerator_for
from dcls_convert.tuning.recipe import Recipe
from dcls_convert.tuning.tracker import TRACK_FILE
from dcls_convert.tuning.training import Training
from dcls_convert.tuning.training_images import open_images

from ..command_line import NET, net, run
from .comparisons import read_comparison

# timm does not close image files.
pytestmark = [
    pytest.mark.usefixtures("images_here"),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
]
SIZE = ("--input-size", "3x32x32")
QUICK = (*SIZE, "--batch-size", "4", "--device", "cpu")


def compare(*arguments, code=0):
    return run("compare", NET, "--data", "images", *QUICK, *arguments, code=code)


def request(**settings):
    return ConversionRequest(model=NET, num_classes=2, input_size=(3, 32, 32), **settings)


# Arms.


def test_arms_with_the_same_seed_share_all_weights_that_are_not_converted():
    arms = make_arms([9, 11], ["normal", "uniform"], ablate=True)
    for seed in (0, 1):
        networks = [make_network(request(seed=seed), arm) for arm in arms]
        original = networks[0].model.state_dict()
        shared = [name for name in original if "stages" not in name]
        for network in networks:
            assert all(
                torch.equal(network.model.state_dict()[name], original[name]) for name in shared
            )
        assert not torch.equal(
            original["stem.weight"], make_network(request(seed=2), arms[0]).model.stem.weight
        )


def test_frozen_arms_start_like_trainable_ones_and_dense_arms_like_the_original():
    original, moving, frozen, dense = (
        make_network(request(), arm) for arm in make_arms([9], ["normal"], ablate=True)
    )
    images = torch.randn(2, 3, 32, 32)
    outputs = [network.model.eval()(images) for network in (original, moving, frozen, dense)]
    torch.testing.assert_close(outputs[1], outputs[2], rtol=0, atol=0)
    torch.testing.assert_close(outputs[3], outputs[0])
    gaussian = make_network(
        request(options=PlanOptions(interpolation="gaussian")), Arm(kind="dense", size=9)
    )
    torch.testing.assert_close(gaussian.model.eval()(images), outputs[0])
    for parameter in position_parameters(frozen.model):
        assert not parameter.tensor.requires_grad
    assert dense.model.stages[0][1].weight.shape[2:] == (9, 9)
    assert dense.model.stages[0][1].weight.requires_grad


def test_position_shifts_are_measured_from_the_initial_positions():
    network = make_network(request(), Arm(kind="converted", size=17))
    trained = make_network(request(), Arm(kind="converted", size=17)).model
    assert network.position_shift(trained).distance == 0
    with torch.no_grad():
        for parameter in position_parameters(trained):
            parameter.tensor.zero_()
            parameter.tensor[0, ..., :1] = 6.0  # outside the old kernel of 7x7
    shift = network.position_shift(trained)
    assert shift.outside == pytest.approx(1 / network.plan.layers[0].kernel_count)
    assert shift.outside_before == 0
    assert (
        make_network(request(), Arm()).position_shift(make_network(request(), Arm()).model) is None
    )


def test_trained_networks_are_calibrated_on_training_images():
    weights = make_network(request(), Arm()).model.state_dict()
    data = open_images(Path("images"))
    settings = Settings(
        model=NET,
        data="images",
        classes=2,
        train_images=len(data.train),
        test_images=len(data.test),
        input_size=(3, 32, 32),
        augmentation="light",
        recipe=Recipe(epochs=1, batch_size=4),
    )
    arguments = {
        "data": data,
        "settings": settings,
        "folder": Path("out"),
        "accelerator": accelerator_for(device="cpu"),
    }
    trainer = Trainer(request=request(weights=weights, options=PlanOptions()), **arguments)
    with patch(
        "dcls_convert.compare.trainer.make_network",
        side_effect=lambda request, arm, **_: (request, arm),
    ) as make_network_mock:
        for arm in (Arm(kind="converted", size=9), Arm()):
            trainer.prepare(arm, 0)
    converted_calibration, original_calibration = (
        call.args[0].calibration for call in make_network_mock.call_args_list
    )
    assert len(converted_calibration) == 16
    assert original_calibration is None


# The command.


def test_a_comparison_writes_a_table_files_and_checkpoints(tmp_path):
    out, err = compare("--sizes", "9", "--epochs", "2", "--seeds", "3", "--output", "out")
    assert "6 runs of 2 epochs of 4 updates on cpu: about" in err
    assert "AdamW, lr" in err
    assert "9x9 kernel: " in out
    assert "The number of seeds was changed" not in out
    comparison = read_comparison(tmp_path / "out")
    assert [arm.label for arm in comparison.arms] == ["as it is", "9x9 kernel"]
    assert [(run.arm.label, run.seed) for run in comparison.runs] == [
        (label, seed) for label in ("as it is", "9x9 kernel") for seed in range(3)
    ]
    assert all(
        len(run.loss) == len(run.top1) == 2 and len(run.right) == 4 for run in comparison.runs
    )
    assert all(run.top1[-1] == 25 * run.right.count("1") for run in comparison.runs)
    assert all(run.top1_before in (0, 25, 50, 75, 100) for run in comparison.runs)
    assert f"{comparison.arms[0].top1_before:.2f}" in out
    assert all(f"run {number} of 6, " in err for number in range(1, 7))
    assert all(err.count(f": epoch {epoch} of 2, top-1") == 6 for epoch in (1, 2))
    assert comparison.missing == ()
    assert comparison.arms[1].distance > 0
    assert not list((tmp_path / "out").rglob("state.pt"))
    assert verify_folder(tmp_path / "out/models/9x9-kernel-seed0").ok
    again, err = compare(
        "--sizes", "9", "--epochs", "2", "--seeds", "3", "--output", "out", "--json"
    )
    assert "runs of" not in err
    assert json.loads(again) == comparison.to_dict()
    out, _ = compare("--sizes", "9", "--epochs", "2", "--seeds", "4", "--output", "out")
    note = (
        "The number of seeds was changed after 1 look, "
        "so claims need a significance level of 1.25 %"
    )
    assert note in " ".join(out.split())


def test_parts_equal_the_whole_and_other_settings_are_refused(tmp_path):
    options = ("--sizes", "9", "--epochs", "1", "--seeds", "2")
    compare(*options, "--output", "whole")
    for part in ("2/3", "1/3", "3/3"):
        out, _ = compare(*options, "--only", part, "--output", "parts")
    assert "missing" not in out
    assert read_comparison(tmp_path / "parts").looks == (2,)  # all parts are one look
    whole, parts = (read_comparison(tmp_path / name) for name in ("whole", "parts"))
    for run_of_whole, run_of_part in zip(whole.runs, parts.runs, strict=True):
        for field in ("arm", "seed", "loss", "right", "moved"):
            assert getattr(run_of_whole, field) == getattr(run_of_part, field)
    with patch(
        "dcls_convert.compare.trainer.Trainer.time_trial",
        side_effect=AssertionError("timed before settings were checked"),
    ):
        _, err = compare("--sizes", "9", "--epochs", "2", "--output", "whole", code=2)
    assert "output whole: holds runs with epochs 1, not 2; use the same or another --output" in err
    out, _ = compare(
        "--sizes", "9,11", "--epochs", "1", "--seeds", "3", "--only", "1/9", "--output", "whole"
    )
    missing = "11x11 kernel, seed 0; 11x11 kernel, seed 1; as it is, seed 2; 9x9 kernel, seed 2"
    assert f"5 runs missing: {missing}; and 1 more" in " ".join(out.split())
    more = read_comparison(tmp_path / "whole")
    assert (more.settings.seeds, more.looks) == (2, (2,))  # the look with 3 seeds is not finished
    assert more.correction == Correction(conversions=2, looks=1)  # 2 seeds are too few to be a look
    _, err = compare(*options, "--output", "images", code=2)
    assert (
        err.splitlines()[-1]
        == "error: output images: holds something other than a comparison; use another folder"
    )


def test_an_interrupted_run_continues(tmp_path):
    options = ("--sizes", "9", "--epochs", "3", "--seeds", "1")
    compare(*options, "--output", "whole")
    train_update = Training._train_update
    calls = 0

    def train_update_until_interrupt(*arguments):
        nonlocal calls
        calls += 1
        if calls > 10 + 12 + 7:  # two trials, the first run, and 7 of 12 updates of the second
            raise KeyboardInterrupt
        return train_update(*arguments)

    with patch.object(Training, "_train_update", train_update_until_interrupt):
        out, err = compare(*options, "--output", "interrupted", code=130)
    assert out.splitlines()[-2:] == [
        " 1 run missing: 9x9 kernel, seed 0",
        " Interrupted: the same command continues with the missing runs.",
    ]
    assert err.splitlines()[-1] == "error: interrupted"
    assert (tmp_path / "interrupted/settings.json").exists()
    assert [path.parent.name for path in (tmp_path / "interrupted").rglob("state.pt")] == [
        "9x9-kernel-seed0"
    ]
    # Interrupt again, after the last epoch.
    with patch("dcls_convert.compare.trainer.save_trained", side_effect=KeyboardInterrupt):
        compare(*options, "--output", "interrupted", code=130)
    compare(*options, "--output", "interrupted")
    whole, interrupted = (read_comparison(tmp_path / name) for name in ("whole", "interrupted"))
    assert [(run.loss, run.top1, run.moved) for run in whole.runs] == [
        (run.loss, run.top1, run.moved) for run in interrupted.runs
    ]
    tracks = [Path(name, "runs/9x9-kernel-seed0", TRACK_FILE) for name in ("whole", "interrupted")]
    assert tracks[0].read_bytes() == tracks[1].read_bytes()


def test_a_damaged_state_is_reported_in_one_line():
    state = Path("out/runs/as-it-is-seed0/state.pt")
    state.parent.mkdir(parents=True)
    state.write_bytes(b"\x80\x02\x8a\nno state")
    options = ("--sizes", "9", "--epochs", "1", "--seeds", "1", "--output", "out")
    _, err = compare(*options, code=2)
    last = err.splitlines()[-1]
    assert last == f"error: {state}: is damaged (EOFError); delete it to restart this run"
    state.unlink()
    compare(*options)


@pytest.mark.parametrize("updates", [0, 10])  # in the trial, and in the first run
def test_out_of_memory_says_what_to_do(updates):
    backward = Training._backward
    calls = 0

    def backward_until_out_of_memory(*arguments):
        nonlocal calls
        calls += 1
        if calls > updates:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return backward(*arguments)

    with patch.object(Training, "_backward", backward_until_out_of_memory):
        _, err = compare("--sizes", "9", "--epochs", "1", "--seeds", "1", code=2)
    last = err.splitlines()[-1]
    assert last.startswith("error: as it is")
    assert last.endswith(": out of memory; use a smaller --batch-size or --input-size")


def test_a_comparison_that_ended_before_any_epoch_does_not_fix_the_settings(tmp_path):
    with patch.object(Training, "run", side_effect=KeyboardInterrupt):
        compare("--sizes", "9", "--epochs", "7", "--seeds", "1", code=130)
    with patch("dcls_convert.compare.trainer.Trainer.run", side_effect=KeyboardInterrupt):
        compare("--sizes", "9", "--epochs", "7", "--seeds", "1", code=130)
    (folder,) = tmp_path.glob("*-comparison")
    assert json.loads((folder / "settings.json").read_text())["recipe"]["epochs"] == 7
    compare("--sizes", "9", "--epochs", "1", "--seeds", "1")
    assert read_comparison(folder).settings.recipe.epochs == 1
    _, err = compare("--sizes", "9", "--epochs", "7", "--seeds", "1", code=2)
    assert "holds runs with epochs 1, not 7" in err


def test_minutes_decide_the_epochs_once(tmp_path):
    # An epoch takes 5 s, and there are 4 runs.
    with patch("dcls_convert.compare.trainer.Trainer.time_trial", return_value=(1.0, 1.0)):
        compare(
            "--sizes", "9", "--seeds", "2", "--minutes", "1", "--only", "1/99", "--output", "out"
        )
        _, err = compare(
            "--sizes", "9", "--seeds", "8", "--minutes", "1", "--output", "other", code=2
        )
    assert (
        "1 minutes: one epoch of all 16 runs takes 2 minutes here; allow more time, or use fewer"
        in err
    )
    assert read_comparison(tmp_path / "out").settings.recipe.epochs == 3
    compare("--sizes", "9", "--seeds", "2", "--minutes", "9", "--only", "99/99", "--output", "out")
    assert read_comparison(tmp_path / "out").settings.recipe.epochs == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give --data FOLDER or --dataset NAME"),
        (("--data", "nowhere"), "--data nowhere: is not a folder"),
        (("--data", "images", "--epochs", "1", "--minutes", "1"), "exclude each other"),
        (("--data", "images", "--only", "4/3"), "'4/3' is not a part such as 3/12"),
        (
            ("--data", "images", "--positions", "normal,there"),
            "is not some of normal, kernel, uniform",
        ),
        (
            ("--data", "images", "--batch-size", "512"),
            "--batch-size: one update needs 512 images, but there are only 16",
        ),
        (("--data", "images", "--num-classes", "7"), "--num-classes 7: the images have 2 classes"),
        (
            ("--data", "images/train/light"),
            "has fewer than two classes; each is a folder of images",
        ),
        (("--data", "images", "--fsdp"), "--fsdp: needs several processes"),
        (
            ("--data", "images", "--augmentation", "none", "--hflip", "0.2"),
            "--hflip has no effect with --augmentation none",
        ),
        (("--data", "images", "--sizes", "8", "--batch-size", "4"), "8x8"),
    ],
)
def test_mistakes_are_reported_in_one_line_and_nothing_is_written(tmp_path, arguments, message):
    _, err = run("compare", NET, *SIZE, "--device", "cpu", *arguments, "--output", "out", code=2)
    assert message in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_a_size_that_does_not_fit_is_refused_before_images_are_read():
    _, err = run("compare", "test_convnext", "--data", "nowhere", "--sizes", "9,8", code=2)
    assert "window 8 (axis 0 of 8x8) must be odd" in err.splitlines()[-1]


def picky_net(num_classes):
    """A network that fails on images that do not have 64 columns."""
    network = net(num_classes)
    network.stem.register_forward_pre_hook(lambda _, inputs: 1 / (inputs[0].shape[-1] == 64))
    return network


def test_a_single_test_image_is_refused(tmp_path):
    for path in sorted(Path("images/validation").rglob("*.png"))[1:]:
        path.unlink()
    _, err = compare("--output", "out", code=2)
    assert "has 16 images to train on and 1 to test with" in err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_weights_for_layers_of_the_authors_package_are_refused():
    state = {"stages.0.1.weight": torch.randn(8, 1, 4), "stages.0.1.P": torch.randn(2, 8, 1, 4)}
    torch.save(state, "authors.pth")
    for command in (("compare", "--data", "images", "--output", "out"), ("sweep", "--sizes", "9")):
        command, *arguments = command
        _, err = run(command, NET, *SIZE, "--checkpoint", "authors.pth", *arguments, code=2)
        assert err.splitlines()[-1].endswith("elements of its own, so there is nothing to compare")


def test_a_network_that_fails_on_the_images_is_a_user_error():
    _, err = run("compare", f"{__name__}:picky_net", "--data", "images", *QUICK, code=2)
    assert err.splitlines()[-1] == "error: as it is: fails on these images: division by zero"


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("dcls_convert.cli.compare.PACKAGES", ("accelerate", "no_such_package"))
    _, err = compare(code=2)
    assert "compare needs packages: pip install no_such_package" in err


def test_the_default_learning_rate_is_the_papers_at_its_batch_size():
    assert default_lr(4096, trained=False) == 4e-3
    assert default_lr(256, trained=True) == 1e-4


def test_shards_give_the_same_runs_as_a_folder_of_the_same_images(tmp_path):
    folder = open_images(tmp_path / "images")
    splits = {}
    for split, images in (("train", folder.train), ("validation", folder.test)):
        names = [f"{split}-0.tar", f"{split}-1.tar"]
        half = len(images) // 2
        for name, samples in zip(
            names, (images.reader.samples[:half], images.reader.samples[half:]), strict=True
        ):
            with tarfile.open(tmp_path / name, "w") as shard:
                # The last one has label -1, which to timm means no label.
                for image, label in [*samples, (samples[0][0], -1)]:
                    (tmp_path / "label").write_text(str(label))
                    shard.add(image, f"some.folder/{Path(image).stem}{label}.png")
                    shard.add(tmp_path / "label", f"some.folder/{Path(image).stem}{label}.cls")
        splits[split] = {
            "name": split,
            "filenames": names,
            "shard_lengths": [half, half],
            "num_samples": len(images),
        }
    (tmp_path / "info.json").write_text(json.dumps({"splits": splits}))
    for output, data in {
        "folder": ("--data", "images"),
        "shards": ("--dataset", "wds/", "--data", "."),
    }.items():
        settings = (
            *QUICK,
            "--num-classes",
            "2",
            "--sizes",
            "9",
            "--epochs",
            "1",
            "--seeds",
            "1",
            "--output",
            output,
        )
        run("compare", NET, *data, *settings)
    outcomes = {}
    for output in ("folder", "shards"):
        runs = read_comparison(tmp_path / output).runs
        outcomes[output] = [(run.loss, run.right) for run in runs]
    assert outcomes["folder"] == outcomes["shards"]
