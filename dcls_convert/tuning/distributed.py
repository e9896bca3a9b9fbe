"""Several devices or processes: accelerate, and FSDP2."""

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
    """An `Accelerator` for this device, named as torch names it; by default for the best one.

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
    """Whether no other process takes part in the training."""
    return bool(accelerator.distributed_type == DistributedType.NO)


def broadcast_buffers(model: nn.Module) -> None:
    """Give the buffers of all processes the values of the first process."""
    for buffer in model.buffers():
        broadcast(buffer)


def gathered(tensor: Tensor) -> Tensor:
    """The tensors of all processes, one after another along the first axis."""
    together: Tensor = gather(tensor)
    return together


def from_first_process(values: list[Any]) -> list[Any]:
    """The values of the first process, in all processes."""
    shared: list[Any] = broadcast_object_list(values)
    return shared


def shard_(model: nn.Module, accelerator: Accelerator) -> None:
    """Shard with FSDP2: a group for every block, inner blocks first, then one for all the rest.

    A block is a module with children in a Sequential or a ModuleList. Positions that its layers
    share with other blocks are in the group of a module around them.
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
    for module in reversed(list(model.modules())):
        if module in blocks:
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
