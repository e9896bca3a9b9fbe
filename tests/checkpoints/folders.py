"""Checkpoint folders for tests, ways to change them, and `seal`, which makes their hashes fit
again.
"""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcls_convert import apply_plan_, find_convs, plan_conversion, predict_report, save_converted
from dcls_convert.checkpoints.folder import CONFIG, WEIGHTS, open_checkpoint
from dcls_convert.checkpoints.inspection import inspect_checkpoint
from dcls_convert.checkpoints.stamp import METADATA_KEY, config_hash
from dcls_convert.checkpoints.verify import check_model_here, verify_folder
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource
from dcls_convert.networks.tensors_hash import tensors_hash

from ..conftest import TINY

IMAGE = (3, 32, 32)


def convert(name=f"timm:{TINY}", size=9, *, seed=0, args=None, input_size=IMAGE, **options):
    """A converted model, in which every layer counts for the outputs, and its plan."""
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
    # ConvNeXt's output hardly depends on its blocks otherwise: layer scale starts at 1e-6.
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("gamma"):
                parameter.uniform_(0.5, 1, generator=generator)
    return model.eval(), plan


def save(folder, model, plan, **options):
    """Faster than with a report that is measured."""
    return save_converted(model, plan, folder, report=predict_report(plan), **options)


def outputs(model, channels=3):
    with torch.no_grad():
        return model.eval()(
            torch.randn(1, channels, 64, 64, generator=torch.Generator().manual_seed(0))
        )


def same_states(first, second):
    ours = first.state_dict()
    theirs = second.state_dict()
    return list(ours) == list(theirs) and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def verify(folder):
    """Without a process of its own, which takes seconds."""
    return verify_folder(folder, check_model=check_model_here)


def inspect_folder(folder):
    return inspect_checkpoint(open_checkpoint(folder))


def problems(verification):
    return [
        f"{check.name}: {check.detail}" for check in verification.checks if check.ok is not True
    ]


def contents(path):
    """Tensors and metadata of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()


def value_paths(data, path=()):
    """Paths to all values of a JSON document."""
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
    """`change` edits the parsed JSON in place, or returns another."""
    data = json.loads(path.read_text())
    path.write_text(json.dumps(change(data) or data))


def edit_stamp(folder, change):
    """`change` takes the stamp and returns another, or a text, or None for no metadata."""
    tensors, metadata = contents(folder / WEIGHTS)
    stamp = change(json.loads(metadata[METADATA_KEY]))
    new = (
        None
        if stamp is None
        else {METADATA_KEY: stamp if isinstance(stamp, str) else json.dumps(stamp)}
    )
    save_file(tensors, folder / WEIGHTS, metadata=new)


def edit_tensors(folder, change):
    tensors, metadata = contents(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata=metadata)


def seal(folder):
    """Let the folder say that it was written as it is now."""
    tensors = tensors_hash(contents(folder / WEIGHTS)[0].items())
    edit_json(folder / CONFIG, lambda config: config.update({METADATA_KEY: {"tensors": tensors}}))
    edit_stamp(
        folder,
        lambda stamp: stamp | {"config": config_hash(json.loads((folder / CONFIG).read_text()))},
    )


class Allocated(TorchDispatchMode):
    """Bytes of all memory that operators allocate on the CPU."""

    def __init__(self):
        super().__init__()
        self.memories = {}
        self.most = 0  # none is taken for freed: an upper bound

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                if memory.data_ptr() not in known and memory.nbytes():
                    self.memories[memory.data_ptr()] = memory.nbytes()
        self.most = max(self.most, sum(self.memories.values()))
        return result
