"""The networks of finetune.py: the one that learns, and the one that it may learn from."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import timm
import torch
from finetune_data import seed_all
from timm.data import resolve_data_config
from torch import Tensor, nn

import dcls_convert
from dcls_convert import DclsConvertError
from dcls_convert.networks.source import ModelSource
from dcls_convert.networks.source import build_model as build_network
from dcls_convert.networks.weights import build_with_state, read_weights

if TYPE_CHECKING:
    from accelerate import Accelerator


def build_model(args: argparse.Namespace, classes: int | None) -> tuple[nn.Module, Any]:
    """The model, with a head for the classes (None: with the head that it has), and its plan or the folder with it."""
    options = {name: value for name, value in [("num_classes", classes), ("drop_path_rate", args.drop_path)] if value}
    seed_all("model", args.seed)  # a new head draws from the global generator
    source = find_source(args.model)
    if source.kind == "local-dir":
        model = timm.create_model(source.name, pretrained=True, **options)
        return model, args.model
    model = timm.create_model(args.model, pretrained=args.pretrained, **options)
    if args.dilated_size is None:
        return model, None
    init = "fit" if args.pretrained else "random"  # as on the command line: random kernels are not worth a fit
    return model, dcls_convert.convert_(model, dilated_size=args.dilated_size, init=init, seed=args.seed).plan


def build_teacher(args: argparse.Namespace, student: nn.Module) -> nn.Module | None:
    """The network whose outputs the student learns to give, whole in every process; None without --teacher."""
    if not args.teacher:
        return None
    source, path = find_source(args.teacher), args.teacher_checkpoint
    if path:
        source.args["num_classes"] = student.num_classes
        where = f"--teacher-checkpoint {path}"
        teacher, _ = build_with_state(source, read_weights(path), where, prepare_=lambda _: None)
    else:
        teacher = build_network(source, pretrained=True, trust_code=True)
    if teacher.num_classes != student.num_classes:
        raise DclsConvertError(
            f"--teacher {args.teacher}: has {teacher.num_classes} classes, {args.model} has {student.num_classes}"
        )
    mine, theirs = (resolve_data_config(model=model) for model in (student, teacher))
    if any(tuple(mine[name]) != tuple(theirs[name]) for name in ("mean", "std")):
        raise DclsConvertError(f"--teacher {args.teacher}: takes images with another mean and std than {args.model}")
    return teacher.eval().requires_grad_(False)


def find_source(name: str) -> ModelSource:
    """Of a folder, or a model of timm."""
    if Path(name).is_dir():
        return ModelSource(name=f"local-dir:{name}")
    if not timm.is_model(name):
        raise DclsConvertError(f"{name}: neither a folder nor a model of timm")
    return ModelSource(name=f"timm:{name}")


class SoftTargets(nn.Module):
    """KL divergence of the student's from the teacher's softmax, both at a temperature (Hinton et al., 2015).

    The square of the temperature keeps the size of the gradients. At a high one, this is the distance of the centred
    outputs. arXiv:1503.02531, section 2.
    """

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.temperature = temperature

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Outputs of student and teacher (N, classes) -> their mean divergence in nats."""
        student, teacher = ((logits.float() / self.temperature).log_softmax(1) for logits in (outputs, targets))
        loss = nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return loss * self.temperature**2


def shard_(model: nn.Module, accelerator: "Accelerator") -> None:
    """FSDP2: every block a group, the innermost first. Shared positions are in the group of a module around them."""
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    lists = [module for module in model.modules() if isinstance(module, nn.Sequential | nn.ModuleList)]
    blocks = {id(block) for blocks in lists for block in blocks if any(True for _ in block.children())}
    for module in reversed(list(model.modules())):
        if id(module) in blocks and not isinstance(module, nn.Sequential | nn.ModuleList):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
