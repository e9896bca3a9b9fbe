"""Ways to damage a checkpoint folder: functions of the folder and of those to mix it up with."""

import os
import shutil
from pathlib import Path

from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS
from dcls_convert.checkpoints.stamp import METADATA_KEY

from .folders import edit_json, edit_stamp, edit_tensors

POSITIONS = "stages.2.blocks.dcls_positions"  # shared by four layers
WEIGHT = "stages.1.blocks.0.conv_dw.weight"


def write(name, content):
    return lambda folder, _others: (folder / name).write_bytes(content)


def swapped(name, other):
    return lambda folder, others: shutil.copy(others / other / name, folder)


def config(change):
    return lambda folder, _others: edit_json(folder / CONFIG, change)


def planned(change):
    return config(lambda data: change(data["model_args"]["plan"]))


def layer(index, **changes):
    return planned(lambda plan: plan["layers"][index].update(changes))


def tensors(change):
    return lambda folder, _others: edit_tensors(folder, change)


def stamp(change):
    return lambda folder, _others: edit_stamp(folder, change)


def flipped(place):
    def damage(folder, _others):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[place] ^= 1
        (folder / WEIGHTS).write_bytes(data)

    return damage


def instead(name, make=lambda path: None):
    def damage(folder, _others):
        (folder / name).unlink()
        make(folder / name)

    return damage


def one_value(name, index, value):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


def renamed(tensors):
    tensors["renamed"] = tensors.pop(WEIGHT)


CHANGED = "model.safetensors: its tensors are not those that were written"
APART = "model.safetensors: was not written with this config.json"
LATER = "this dcls-convert knows 1 at most; upgrade it: pip install --upgrade dcls-convert"

# What was done, and what verify must say of it. No row loads.
DAMAGES = {
    # The weights
    "no weights": (instead(WEIGHTS), "model.safetensors: there is no such file"),
    "a flipped bit, in the middle": (flipped(-50_000), CHANGED),
    "weights of another seed": (swapped(WEIGHTS, "seed"), APART, CHANGED),
    "outside the window": (
        tensors(one_value(POSITIONS, 7, 4.5)),
        CHANGED,
        "has 1 of 1248 elements outside the window",
    ),
    "a tensor renamed": (tensors(renamed), CHANGED, f"missing: {WEIGHT}; unexpected: renamed"),
    "a tensor of integers": (
        tensors(lambda t: t.update({WEIGHT: t[WEIGHT].int()})),
        CHANGED,
        "is torch.int32",
    ),
    "no metadata": (
        stamp(lambda _: None),
        "has no metadata of dcls-convert, but config.json states its tensors",
    ),
    "metadata of a newer format": (stamp(lambda s: s | {"format": 7}), f"has format 7, {LATER}"),
    "damaged outputs": (
        stamp(lambda s: s | {"fingerprint": {"outputs": [3]}}),
        "metadata 'dcls_convert': fingerprint",
    ),
    # The config, and the plan in it
    "no config": (instead(CONFIG), "config.json: cannot be read"),
    "a folder for the config": (
        instead(CONFIG, Path.mkdir),
        "config.json: cannot be read: is not a file",
    ),
    "a huge config": (
        lambda folder, _: os.truncate(folder / CONFIG, 100 << 20),
        "has 104,857,600 bytes",
    ),
    "config not UTF-8": (write(CONFIG, b"\xff\xfe{\x00"), "config.json: cannot be read"),
    "config not JSON": (write(CONFIG, b'{"architecture": '), "config.json: is not JSON"),
    "config of deep lists": (write(CONFIG, b"[" * 100_000), "config.json: is not JSON"),
    "config of another plan": (swapped(CONFIG, "size"), APART, CHANGED),
    "other arguments": (config(lambda c: c["model_args"].update(act_layer="relu")), APART),
    "another hash": (
        config(lambda c: c.update({METADATA_KEY: {"tensors": "0" * 64}})),
        APART,
        CHANGED,
    ),
    "plan a list": (
        config(lambda c: c["model_args"].update(plan=[])),
        "config.json: model_args.plan: ",
    ),
    "another window, of which all shapes are the same": (layer(0, dilated_size=[11, 11]), APART),
    "another count": (
        layer(0, kernel_count=25),
        APART,
        "stages.0.blocks.0.conv_dw.positions has shape",
    ),
}
FLIPPED = "a flipped bit, in the middle"
