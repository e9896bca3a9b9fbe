"""Training on several devices or in several processes, with accelerate and FSDP2."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ..errors import DclsConvertError

try:
    from accelerate import Accelerator
    from accelerate.utils import (
        DistributedType,
        broadcast,
        broadcast_object_list,
        gather,
        patch_environment,
    )
except ImportError as error:
    raise DclsConvertError("training needs accelerate: pip install accelerate scipy") from error


def accelerator_for(
    *, device: str | None = None, mixed_precision: str | None = None
) -> Accelerator:
    """Return an `Accelerator` for a device, named as in torch.

    By default it uses the accelerator of this machine, or the CPU if there is none.

    Raises:
        DclsConvertError: `accelerate launch` asks for FSDP1.
    """
    environment = {}
    if device not in (None, "cpu"):
        environment["ACCELERATE_TORCH_DEVICE"] = str(device)
    use_cpu = device == "cpu" or not torch.accelerator.is_available()
    with patch_environment(**environment):  # accelerate reads the device when it starts
        accelerator = Accelerator(mixed_precision=mixed_precision, cpu=use_cpu)
    if accelerator.distributed_type == DistributedType.FSDP:
        raise DclsConvertError(
            "accelerate launch with --use_fsdp is FSDP1; omit it, and pass --fsdp to this program"
        )
    return accelerator


def is_single_process(accelerator: Accelerator) -> bool:
    """True if no other process takes part in the training."""
    return bool(accelerator.distributed_type == DistributedType.NO)


def broadcast_buffers_(model: nn.Module) -> None:
    """Set the buffers of all processes to the first process's values."""
    for buffer in model.buffers():
        broadcast(buffer)


def gathered(tensor: Tensor) -> Tensor:
    """Return the tensors of all processes, concatenated along the first axis."""
    all_tensors: Tensor = gather(tensor)
    return all_tensors


def from_first_process(values: list[Any]) -> list[Any]:
    """Return the first process's values, in all processes."""
    shared: list[Any] = broadcast_object_list(values)
    return shared


def shard_(model: nn.Module, accelerator: Accelerator) -> None:
    """Shard the model with FSDP2: one group for each block, and one for everything else.

    A block is an element of a Sequential or a ModuleList that has children itself. Positions that
    layers of several blocks share belong to the group of a module around these blocks.
    """
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    blocks: set[nn.Module] = set()
    for container in model.modules():
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for module in container:
                is_container = isinstance(module, nn.Sequential | nn.ModuleList)
                has_children = next(module.children(), None) is not None
                if has_children and not is_container:
                    blocks.add(module)
    for module in reversed(list(model.modules())):  # inner blocks first
        if module in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
