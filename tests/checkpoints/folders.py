"""Checkpoint folders for tests, and ways to edit them.

`seal` makes the hash of edited tensors fit again.
"""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dcls_convert import apply_plan_, find_convs, plan_conversion, predict_report, save_converted
from dcls_convert.checkpoints.folder import METADATA_KEY, WEIGHTS, open_folder
from dcls_convert.checkpoints.inspection import inspect_state
from dcls_convert.checkpoints.stored_weights import read_state, tensors_hash
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource

from ..conftest import TINY

IMAGE = (3, 32, 32)


def convert(name=f"timm:{TINY}", size=9, *, seed=0, args=None, input_size=IMAGE, **options):
    """Return a converted model, all of whose layers affect the outputs, and its plan."""
    source = ModelSource(name=name, args=args or {})
    model = build_model(source, seed=seed)
    convs = find_convs(model, (source.args.get("in_chans", 3), *input_size[1:]))
    plan = plan_conversion(convs, dilated_size=size, model=name, model_args=source.args, **options)
    apply_plan_(
        model,
        plan,
        init="random",
        positions="uniform",
        generator=torch.Generator().manual_seed(seed),
    )
    generator = torch.Generator().manual_seed(1)
    # Without this, ConvNeXt's output hardly depends on its blocks: layer scale starts at 1e-6.
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gamma"):
                parameter.uniform_(0.5, 1, generator=generator)
    return model.eval(), plan


def save(folder, model, plan, **options):
    """Save with a predicted report, which is faster than measuring one."""
    return save_converted(model, plan, folder, report=predict_report(plan), **options)


def outputs(model, channels=3):
    image = torch.randn(1, channels, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(image)


def same_states(first, second):
    first_state = first.state_dict()
    second_state = second.state_dict()
    if list(first_state) != list(second_state):
        return False
    return all(torch.equal(first_state[name], second_state[name]) for name in first_state)


def inspect_folder(folder):
    opened = open_folder(folder)
    return inspect_state(opened, read_state(opened))


def problems(verification):
    return [
        f"{check.name}: {check.detail}" for check in verification.checks if check.ok is not True
    ]


def contents(path):
    """Return the tensors and the metadata of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()


def value_paths(data, path=()):
    """Yield the paths to all values of a JSON document."""
    if path:
        yield path
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        items = ()
    for key, value in items:
        yield from value_paths(value, (*path, key))


def edit_json(path, change):
    """Edit a JSON file: `change` edits the parsed data in place, or returns new data."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps(change(data) or data))


def edit_stamp(folder, change):
    tensors, metadata = contents(folder / WEIGHTS)
    stamp = change(json.loads(metadata[METADATA_KEY]))
    save_file(tensors, folder / WEIGHTS, metadata={METADATA_KEY: json.dumps(stamp)})


def edit_tensors(folder, change):
    tensors, metadata = contents(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata=metadata)


def seal(folder):
    """Rewrite the hash, so that the tensors look as if they had been written as they are now."""
    tensors, _ = contents(folder / WEIGHTS)
    edit_stamp(folder, lambda stamp: stamp | {"tensors": tensors_hash(tensors.items())})
