"""What a training loop needs beside the model: parameter groups, clamping, the repulsive loss,
records of positions.

    optimizer = torch.optim.AdamW(dcls_convert.tuning.param_groups(model, lr=1e-3,
    weight_decay=0.05))

All of it works for models without DCLS layers too, and inside the wrappers of DDP, `torch.compile`
and EMA; under FSDP2 where a docstring says so. Nothing here changes a model, but
`clamp_positions_`. Source of the techniques: arXiv:2112.03740, section 3 "Learning techniques".
"""

from ..networks.positions import clamp_positions_, no_weight_decay
from .param_groups import param_groups
from .recipe import Recipe
from .repulsion import repulsive_loss
from .tracker import PositionTracker, TrackedPositions, TrackRecord, read_track, show_in_tensorboard

__all__ = [
    "PositionTracker",
    "Recipe",
    "TrackRecord",
    "TrackedPositions",
    "clamp_positions_",
    "no_weight_decay",
    "param_groups",
    "read_track",
    "repulsive_loss",
    "show_in_tensorboard",
]
