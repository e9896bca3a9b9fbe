"""Tries every way into every folder that it is given, and prints what each one did; run in a process of its own.

python -m tests.checkpoints.audit FOLDERS HUB, where FOLDERS holds the folder "good" and others that name what must
not be built or read, and HUB is a cache of the hub that holds them all. An audit hook notes and refuses what Python
does meanwhile.
"""

import json
import sys
from pathlib import Path

import huggingface_hub
import timm
import torch
import torchvision

import dcls_convert
from dcls_convert.checkpoints.inspection import inspect_folder
from dcls_convert.checkpoints.verify import verify_folder
from dcls_convert.export.formats import fold_checkpoint

from ..audit_hook import watched

LOADED = (torch, torchvision, huggingface_hub)  # imported before the hook, so that their import is no event


def ways(folder, hub):
    """Every way in, by name."""
    local, remote = f"local-dir:{folder}", f"hf-hub:me/{folder.name}"
    return {
        "load_converted": lambda: dcls_convert.load_converted(folder),
        "verify": lambda: verify_folder(folder),
        "fold": lambda: fold_checkpoint(folder, "timm", folder.parent / f"folded-{folder.name}"),
        "inspect": lambda: inspect_folder(folder),
        "timm": lambda: timm.create_model(local),
        "timm, pretrained": lambda: timm.create_model(local, pretrained=True),
        "timm, new head": lambda: timm.create_model(local, pretrained=True, num_classes=3),
        "timm, features": lambda: timm.create_model(local, pretrained=True, features_only=True),
        "hub": lambda: timm.create_model(remote, cache_dir=hub),
        "hub, pretrained": lambda: timm.create_model(remote, pretrained=True, cache_dir=hub),
    }


def main(folders, hub):
    for way in ways(folders / "good", hub).values():  # imports whatever a healthy folder needs
        way()
    results = []
    for folder in sorted(path for path in folders.iterdir() if not path.name.startswith(("good", "folded-"))):
        for name, way in ways(folder, hub).items():
            error, text = None, ""
            with watched(folders, hub) as events:
                try:
                    found = way()
                except BaseException as problem:
                    error, text = type(problem).__name__, str(problem)
            if error is None and name == "verify":
                text = " ".join(check.detail for check in found.checks)
            results.append({"folder": folder.name, "way": name, "error": error, "text": text, "events": events})
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
