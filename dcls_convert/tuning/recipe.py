"""The settings of a training run. Defaults of options that users know are in `options.py`."""

import math
from dataclasses import dataclass

from ..errors import DclsConvertError
from ..options import POSITION_LR_SCALE
from .param_groups import WEIGHT_DECAY

AT_LEAST_ONE = ("epochs", "batch_size", "accumulate")
BELOW_ONE = ("smoothing", "ema")
# Increment it when a change to this package makes new runs not comparable with old ones.
RECIPE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of a training run, which uses AdamW with the groups of `param_groups`.

    Raises:
        DclsConvertError: A value is out of range, or mixup or cutmix gets an odd batch size.
    """

    epochs: int = 10
    batch_size: int = 32  # images per batch and process
    accumulate: int = 1  # batches per update
    lr: float = 1e-3
    position_lr_scale: float = POSITION_LR_SCALE
    weight_decay: float = WEIGHT_DECAY  # of the weights; positions have none
    sched: str = "cosine"  # timm's name
    warmup_epochs: int = 1
    clip_grad: float = 1.0  # maximum norm of the gradients; 0: no clipping
    smoothing: float = 0.1  # label smoothing
    mixup: float = 0.0
    cutmix: float = 0.0
    ema: float = 0.0  # decay of the averaged weights, which are then tested; 0: no averaging
    repulsive: float = 0.0  # weight of the squared repulsive loss, which keeps elements apart
    temperature: float = 4.0  # divides a student's and its teacher's logits before softmax
    freeze_statistics: bool = False  # keep BatchNorm's running statistics; useful with few images
    seed: int = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name != "sched":
                _check_number(name, getattr(self, name))
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise DclsConvertError(
                f"batch size {self.batch_size}: mixup and cutmix need an even one"
            )

    def update_size(self, processes: int) -> int:
        """Return the number of images per update, over all processes."""
        return self.batch_size * self.accumulate * processes


def _check_number(name: str, value: float) -> None:
    """Raise DclsConvertError if the value is out of the range of its setting."""
    number = f"{name.replace('_', ' ')} {value}"
    if name in AT_LEAST_ONE and not 1 <= value < math.inf:
        raise DclsConvertError(f"{number}: must be at least 1")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise DclsConvertError(f"{number}: must be at least 0 and below 1")
    if name == "temperature" and not 0 < value < math.inf:
        raise DclsConvertError(f"{number}: must be above 0")
    if not 0 <= value < math.inf:
        raise DclsConvertError(f"{number}: must be at least 0")
