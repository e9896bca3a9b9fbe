"""Tools for your own training loop: parameter groups, clamping, the repulsive loss, and records of
positions.

    groups = dcls_convert.tuning.param_groups(model, lr=1e-3, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups)

Everything also works for models without DCLS layers, and for models wrapped by DDP, `torch.compile`
or EMA. FSDP2 is supported where the docstring says so. Only `clamp_positions_` changes a model.
Source: arXiv:2112.03740, section 3 "Learning techniques".
"""

from ..networks.position_parameters import clamp_positions_, no_weight_decay
from .param_groups import param_groups
from .repulsion import repulsive_loss
from .tracker import PositionTracker, TrackedPositions, TrackRecord, read_track

__all__ = [
    "PositionTracker",
    "TrackRecord",
    "TrackedPositions",
    "clamp_positions_",
    "no_weight_decay",
    "param_groups",
    "read_track",
    "repulsive_loss",
]
