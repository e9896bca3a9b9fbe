"""A stand-in for timm's train.py, which is not in timm's wheel. It has the same options and makes
the same calls of timm in the same order.

It supports only what the recipes in examples/imagenet.md and docs/timm.md need, on CPUs, without
their augmentation and losses. If TIMM_TRAIN_SCRIPT names timm's own script, test_imagenet runs that
instead.
"""

import argparse
import contextlib
import logging
from pathlib import Path

import torch
from timm import create_model
from timm.data import create_dataset, create_loader, resolve_data_config
from timm.models import load_checkpoint, resume_checkpoint
from timm.optim import create_optimizer_v2, optimizer_kwargs
from timm.scheduler import create_scheduler_v2, scheduler_kwargs
from timm.utils import (
    CheckpointSaver,
    ModelEmaV3,
    init_distributed_device,
    random_seed,
    setup_default_logging,
)
from torch.nn.parallel import DistributedDataParallel

# The options of train.py with their defaults, by type.
STRINGS = {
    "model": "resnet50",
    "data-dir": None,
    "dataset": "",
    "output": "output/train",
    "experiment": "",
    "resume": "",
    "opt": "sgd",
    "sched": "cosine",
    "aa": None,
    "remode": "pixel",
    "train-interpolation": "random",
    "amp-dtype": "float16",
    "device": "cuda",
}
INTEGERS = {
    "batch-size": 128,
    "grad-accum-steps": 1,
    "epochs": 300,
    "warmup-epochs": 5,
    "cooldown-epochs": 0,
    "workers": 4,
    "patience-epochs": 10,
    "recount": 1,
    "num-classes": None,
}
FLOATS = {
    "lr": 0.05,
    "weight-decay": 2e-5,
    "momentum": 0.9,
    "warmup-lr": 1e-5,
    "min-lr": 0.0,
    "decay-epochs": 90.0,
    "decay-rate": 0.1,
    "mixup": 0.0,
    "cutmix": 0.0,
    "smoothing": 0.1,
    "reprob": 0.0,
    "crop-pct": None,
    "drop-path": None,
    "bce-target-thresh": None,
    "model-ema-decay": 0.9998,
}
FLAGS = (
    "pretrained",
    "sched-on-updates",
    "warmup-prefix",
    "amp",
    "bce-loss",
    "model-ema",
    "pin-mem",
)


def parse():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for kind, defaults in ((str, STRINGS), (int, INTEGERS), (float, FLOATS)):
        for name, default in defaults.items():
            parser.add_argument(f"--{name}", type=kind, default=default)
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--input-size", type=int, nargs=3)
    parser.add_argument("--opt-betas", type=float, nargs="+")
    return parser.parse_args()


def main():
    setup_default_logging()
    args = parse()
    args.opt_eps = args.layer_decay = None
    device = init_distributed_device(args)
    random_seed(42, args.rank)
    model = create_model(
        args.model,
        pretrained=args.pretrained,
        drop_path_rate=args.drop_path,
        num_classes=args.num_classes,
    )
    config = resolve_data_config(vars(args), model=model)
    options = {"split": "train", "is_training": True, "seed": 42, "batch_size": args.batch_size}
    loader = create_loader(
        create_dataset(args.dataset, root=args.data_dir, **options),
        input_size=config["input_size"],
        batch_size=args.batch_size,
        is_training=True,
        mean=config["mean"],
        std=config["std"],
        num_workers=args.workers,
        device=device,
        distributed=args.distributed,
    )
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    start = resume_checkpoint(model, args.resume, optimizer) if args.resume else 0
    average = ModelEmaV3(model, decay=args.model_ema_decay) if args.model_ema else None
    if average and args.resume:
        load_checkpoint(average.module, args.resume, use_ema=True)
    parallel_model = DistributedDataParallel(model) if args.distributed else model
    folder = Path(args.output, args.experiment)
    folder.mkdir(parents=True, exist_ok=True)
    folder = str(folder)
    saver = CheckpointSaver(
        model, optimizer, args, average, checkpoint_dir=folder, recovery_dir=folder, decreasing=True
    )
    scheduler, epochs = create_scheduler_v2(
        optimizer, **scheduler_kwargs(args), updates_per_epoch=len(loader)
    )
    if start and args.sched_on_updates:
        scheduler.step_update(start * len(loader))
    elif start:
        scheduler.step(start)
    for epoch in range(start, epochs):
        if hasattr(loader.dataset, "set_epoch"):
            loader.dataset.set_epoch(epoch)
        loss = train_one_epoch(epoch, parallel_model, loader, optimizer, args, scheduler, average)
        if args.rank == 0:
            saver.save_checkpoint(epoch, metric=loss)
        scheduler.step(epoch + 1, loss)
    if args.distributed:
        torch.distributed.barrier()  # as finetune.py's `end`
        torch.distributed.destroy_process_group()


def train_one_epoch(epoch, model, loader, optimizer, args, scheduler, average):
    model.train()
    autocast = contextlib.nullcontext()
    if args.amp:
        autocast = torch.autocast("cpu", getattr(torch, args.amp_dtype))
    for index, (images, targets) in enumerate(loader):
        with autocast:
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if average:
            average.update(getattr(model, "module", model))
        if args.rank == 0:
            rates = sorted({group["lr"] for group in optimizer.param_groups})
            logging.getLogger("train").info(
                f"Train: {epoch} [{index}/{len(loader)}] loss {loss.item():.3f} LR {rates}"
            )
        scheduler.step_update(epoch * len(loader) + index + 1)
    return loss.item()


if __name__ == "__main__":
    main()
