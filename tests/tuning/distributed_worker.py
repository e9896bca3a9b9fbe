"""The program that `test_distributed` starts in every process. It makes two training steps.

`python -m tests.tuning.distributed_worker FOLDER` must be one of several processes, with the
environment that torchrun sets. It stores the results in FOLDER/RANK.pt.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.distributed as dist
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import dcls_convert
from dcls_convert import tuning
from dcls_convert.layers.dcls_conv import DclsConv2d

BATCH = 4
STEPS = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True, kw_only=True)
class FlatCase:
    """A training under FSDP1."""

    unit: str = "root"  # what is wrapped by itself: "root", "stage" or "block"
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = True
    interpolation: str = "bilinear"
    dilated_size: tuple[int, int] = (11, 7)


FLAT_CASES = [
    FlatCase(),
    FlatCase(use_orig_params=False),
    FlatCase(unit="stage", interpolation="gaussian"),
    FlatCase(unit="stage", use_orig_params=False, dilated_size=(9, 9)),
]


@dataclass(frozen=True, kw_only=True)
class Case:
    # "none", "ddp", or the modules that are separate FSDP2 groups: "root", "stage", "block"; in
    # "stage+later blocks", all blocks of a stage but the first, which has the positions.
    engine: str = "none"
    interpolation: str = "bilinear"
    dilated_size: tuple[int, int] = (9, 9)
    repulsive: bool = False

    @property
    def sharded(self) -> bool:
        return self.engine not in ("none", "ddp")


CASES = [
    Case(engine="ddp"),
    Case(engine="ddp", interpolation="gaussian", repulsive=True),
    Case(engine="root"),
    # A rectangular window has different limits for each axis.
    Case(engine="stage", interpolation="gaussian", dilated_size=(11, 7)),
    Case(engine="stage+later blocks", repulsive=True),
]


def converted(case: Case | FlatCase) -> nn.Module:
    torch.manual_seed(0)
    # With the default layer scale of 1e-6, no position would learn.
    model = timm.create_model("test_convnext", num_classes=3, ls_init_value=0.5)
    dcls_convert.convert_(
        model, dilated_size=case.dilated_size, interpolation=case.interpolation, init="random"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "positions" in name:
                parameter.mul_(4)  # moves many to the border, so that every step clamps some
    tuning.clamp_positions_(model)
    return model.double().train()


def shard_(model: nn.Module, engine: str) -> None:
    """Shard with FSDP2, innermost modules first."""
    for stage in model.stages:
        for index, block in enumerate(stage.blocks):
            if engine == "block" or (index > 0 and "later blocks" in engine):
                fully_shard(block)
        if "stage" in engine:
            fully_shard(stage)
    fully_shard(model)


def error_if_every_block_is_sharded() -> str:
    model = converted(Case())
    shard_(model, "block")
    images, _ = batch(0)
    try:
        model(images)
    except RuntimeError as error:
        return str(error)
    return "none"


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 32, 32, generator=generator, dtype=torch.float64)
    return images, torch.randint(3, (BATCH,), generator=generator)


def ties(model: nn.Module) -> list[tuple[int, int]]:
    """Return for every layer the index of its positions among the parameters, and how often they
    occur there.
    """
    parameters = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    used = [id(module.positions) for module in model.modules() if isinstance(module, DclsConv2d)]
    return [(parameters.index(positions), parameters.count(positions)) for positions in used]


def train(case: Case, rank: int = 0, processes: int = 1) -> dict[str, Any]:
    model = inner_model = converted(case)
    averaged = ModelEmaV3(inner_model, decay=0.5)
    if case.sharded:
        shard_(model, case.engine)
        shard_(averaged.module, case.engine)
    elif case.engine == "ddp":
        model = DistributedDataParallel(inner_model)
    optimizer = torch.optim.AdamW(tuning.param_groups(inner_model, lr=0.01, position_lr_scale=20.0))
    own_images = slice(rank * BATCH // processes, (rank + 1) * BATCH // processes)
    losses = []
    for step in range(STEPS):
        images, labels = batch(step)
        loss = nn.functional.cross_entropy(model(images[own_images]), labels[own_images])
        if case.repulsive:
            loss = loss + 0.1 * tuning.repulsive_loss(inner_model) ** 2
        loss.backward()
        losses.append(loss.detach())
        gradients = {}
        for name, parameter in inner_model.named_parameters():
            gradient = parameter.grad
            gradients[name] = getattr(gradient, "full_tensor", gradient.detach)()
        optimizer.step()
        tuning.clamp_positions_(inner_model)
        optimizer.zero_grad()
        averaged.update(inner_model)
    return {
        "state": get_model_state_dict(inner_model, options=FULL),
        "averaged": get_model_state_dict(averaged.module, options=FULL),
        "gradients": gradients,  # of the last step; Adam's steps hardly depend on their scale
        "losses": torch.stack(losses),
        "ties": ties(inner_model),
        "ties averaged": ties(averaged.module),
    }


def wrapped(model: nn.Module, case: FlatCase) -> nn.Module:
    """Wrap with FSDP1."""
    kinds: dict[str, nn.Module] = {"stage": model.stages[0], "block": model.stages[0].blocks[0]}
    policy = None
    if case.unit != "root":
        policy = ModuleWrapPolicy({type(kinds[case.unit])})
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=policy,
        use_orig_params=case.use_orig_params,
        sharding_strategy=ShardingStrategy[case.strategy],
        device_id=torch.device("cpu"),
    )


def train_flat(case: FlatCase, rank: int = 0, processes: int = 1) -> dict[str, Any]:
    """Train under FSDP1 if there are several processes."""
    network = converted(case)
    model = network
    # With `use_orig_params`, FSDP1 keeps these parameters, and gives them other shapes.
    groups: Any = tuning.param_groups(network, lr=0.1, weight_decay=0.5)
    if processes > 1:
        model = wrapped(network, case)
    if not case.use_orig_params:
        groups = [*model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    tracker = tuning.PositionTracker(network)
    spreads = []
    own_images = slice(rank * BATCH // processes, (rank + 1) * BATCH // processes)
    losses = []
    for step in range(STEPS):
        images, labels = batch(step)
        loss = nn.functional.cross_entropy(model(images[own_images]), labels[own_images])
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        with FullyShardedDataParallel.summon_full_params(model):
            tuning.clamp_positions_(model)
            record = tracker.update(step)
        spreads.append({name: row.spread for name, row in record.positions.items()})
        optimizer.zero_grad()
    return {
        "losses": torch.stack(losses),
        "spreads": spreads,
        "state": get_model_state_dict(model, options=FULL),
        "refusals": refusals(network) if processes > 1 else [],
    }


def refusals(model: nn.Module) -> list[str]:
    """Return how functions refuse flattened positions."""
    tracker = tuning.PositionTracker(model)
    calls = (
        lambda: tuning.clamp_positions_(model),
        lambda: tuning.param_groups(model),
        lambda: tuning.repulsive_loss(model),
        lambda: tracker.update(0),
    )
    messages = []
    for call in calls:
        try:
            call()
        except dcls_convert.DclsConvertError as error:
            messages.append(str(error))
    return messages


def errors_if_every_block_is_wrapped() -> list[str]:
    """Return what FSDP1 says where tied layers are in other units than their positions."""
    messages = []
    for case in (
        FlatCase(unit="block"),
        FlatCase(unit="block", use_orig_params=False),
        FlatCase(unit="block", strategy="NO_SHARD"),  # as FSDP1 does in one process
    ):
        model = wrapped(converted(case), case)
        try:
            model(batch(0)[0])
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    processes = int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=processes
    )
    results = {
        "cases": [train(case, rank, processes) for case in CASES],
        "error": error_if_every_block_is_sharded(),
        "flat cases": [train_flat(case, rank, processes) for case in FLAT_CASES],
        "flat errors": errors_if_every_block_is_wrapped(),
    }
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()  # as finetune.py's `end`
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
