"""Tools for your own training loop: parameter groups, clamping, the repulsive loss, records of
positions, and the schedule of delays.

    groups = dcls_convert.tuning.param_groups(model, lr=1e-3, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups)

Everything also works for models without DCLS layers, and for models wrapped by DDP, `torch.compile`
or EMA. FSDP2 is supported where the docstring says so. Functions with a trailing underscore change
the model.
Source: arXiv:2112.03740, section 3 "Learning techniques".
"""

from ..layers.position_parameters import clamp_positions_, no_weight_decay
from .delays import round_positions_, shrink_sigma_
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
    "round_positions_",
    "shrink_sigma_",
]
