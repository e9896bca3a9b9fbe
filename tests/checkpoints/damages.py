"""Ways to damage a checkpoint folder: functions (folder, others) that change the folder in place.

`others` is a folder of more checkpoint folders, whose files may be taken.
"""

import os
import shutil
from pathlib import Path

from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS

from .folders import edit_json, edit_stamp, edit_tensors

POSITIONS = "stages.2.blocks.0.conv_dw.positions"  # shared by four layers
WEIGHT = "stages.1.blocks.0.conv_dw.weight"


def write_file(name, content):
    return lambda folder, _others: (folder / name).write_bytes(content)


def take_file(name, other):
    return lambda folder, others: shutil.copy(others / other / name, folder)


def damage_config(change):
    return lambda folder, _others: edit_json(folder / CONFIG, change)


def damage_plan(change):
    return damage_config(lambda data: change(data["model_args"]["plan"]))


def damage_layer(index, **changes):
    return damage_plan(lambda plan: plan["layers"][index].update(changes))


def damage_tensors(change):
    return lambda folder, _others: edit_tensors(folder, change)


def damage_stamp(change):
    return lambda folder, _others: edit_stamp(folder, change)


def flip_bit(index):
    def damage(folder, _others):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[index] ^= 1
        (folder / WEIGHTS).write_bytes(data)

    return damage


def replace_file(name, make=lambda path: None):
    def damage(folder, _others):
        (folder / name).unlink()
        make(folder / name)

    return damage


def set_value(name, index, value):
    def change(tensors):
        tensors[name].view(-1)[index] = value

    return change


def rename_weight(tensors):
    tensors["renamed"] = tensors.pop(WEIGHT)


CHANGED = "model.safetensors: its tensors are not those that were written"
NEWER_FORMAT = "but this dcls-convert reads format 2 at most; install a newer one"

FLIPPED_BIT = "a flipped bit, in the middle"

# By name: the damage, and what `verify` must say about it. None of these folders can be loaded.
DAMAGES = {
    # Weights
    "no weights": (replace_file(WEIGHTS), "model.safetensors: there is no such file"),
    FLIPPED_BIT: (flip_bit(-50_000), CHANGED),
    "cut off": (
        lambda folder, _: os.truncate(folder / WEIGHTS, 60_000),
        "model.safetensors: not a readable safetensors file",
    ),
    "weights of another window": (
        take_file(WEIGHTS, "size"),
        "cells outside of the window 9x9, so they are of a larger window",
    ),
    "outside the window": (
        damage_tensors(set_value(POSITIONS, 7, 14.0)),
        CHANGED,
        "has elements up to 10 cells outside of the window 9x9",
    ),
    "a tensor renamed": (
        damage_tensors(rename_weight),
        CHANGED,
        f"missing: {WEIGHT}; unexpected: renamed",
    ),
    "a tensor of integers": (
        damage_tensors(lambda t: t.update({WEIGHT: t[WEIGHT].int()})),
        CHANGED,
        "is torch.int32",
    ),
    "metadata of a newer format": (
        damage_stamp(lambda s: s | {"format": 7}),
        f"has format 7, {NEWER_FORMAT}",
    ),
    "damaged outputs": (
        damage_stamp(lambda s: s | {"fingerprint": {"outputs": [3]}}),
        "metadata 'dcls_convert': fingerprint",
    ),
    # Config and plan
    "no config": (replace_file(CONFIG), "config.json: cannot be read"),
    "a folder for the config": (
        replace_file(CONFIG, Path.mkdir),
        "config.json: cannot be read: is not a file",
    ),
    "a huge config": (
        lambda folder, _: os.truncate(folder / CONFIG, 100 << 20),
        "has 104,857,600 bytes",
    ),
    "config not UTF-8": (write_file(CONFIG, b"\xff\xfe{\x00"), "config.json: is not JSON"),
    "config not JSON": (write_file(CONFIG, b'{"architecture": '), "config.json: is not JSON"),
    "config of deep lists": (write_file(CONFIG, b"[" * 100_000), "config.json: is not JSON"),
    "another hash": (damage_stamp(lambda s: s | {"tensors": "0" * 64}), CHANGED),
    "plan a list": (
        damage_config(lambda c: c["model_args"].update(plan=[])),
        "config.json: model_args.plan: ",
    ),
    "a smaller window with the same shapes": (
        damage_layer(0, dilated_size=[7, 7]),
        "cells outside of the window 7x7, so they are of a larger window",
    ),
    "another count": (
        damage_layer(0, kernel_count=25),
        "stages.0.blocks.0.conv_dw.positions has shape",
    ),
}
# Other networks in a folder's place, which load. `verify` finds them by their outputs.
OTHER_NETWORKS = {
    "other arguments": damage_config(lambda c: c["model_args"].update(act_layer="relu")),
    "other weights": damage_tensors(set_value(WEIGHT, 0, 1e6)),
}
