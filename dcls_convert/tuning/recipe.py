"""How a network is trained."""

import math
from dataclasses import dataclass

from ..errors import DclsConvertError
from ..options import POSITION_LR_SCALE
from .param_groups import WEIGHT_DECAY

AT_LEAST_ONE = ("epochs", "batch_size", "accumulate")
BELOW_ONE = ("smoothing", "ema")
# Raised when a change of this package makes later runs not comparable with earlier ones.
RECIPE_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """AdamW with the parameter groups of `param_groups`, and these settings.

    Raises:
        DclsConvertError: A value that no training can have.
    """

    epochs: int = 10
    batch_size: int = 32  # images at once, in each process
    accumulate: int = 1  # batches in one update
    lr: float = 1e-3
    position_lr_scale: float = POSITION_LR_SCALE
    weight_decay: float = WEIGHT_DECAY  # of the weights; positions have none
    sched: str = "cosine"  # timm's name
    warmup_epochs: int = 1
    clip_grad: float = 1.0  # largest norm of the gradients; 0: not clipped
    smoothing: float = 0.1  # of the labels
    mixup: float = 0.0
    cutmix: float = 0.0
    ema: float = 0.0  # decay of the averaged weights, which are then tested; 0: no average
    repulsive: float = 0.0  # weight of the square of the repulsive loss, which keeps elements apart
    # Divides the outputs of a student and of its teacher before softmax.
    temperature: float = 4.0
    freeze_statistics: bool = False  # BatchNorm keeps the statistics that it has; for few images
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
        """Images of one update, in all processes together."""
        return self.batch_size * self.accumulate * processes


def _check_number(name: str, value: float) -> None:
    """Raise DclsConvertError if no training can have this value."""
    number = f"{name.replace('_', ' ')} {value}"
    if name in AT_LEAST_ONE and not 1 <= value < math.inf:
        raise DclsConvertError(f"{number}: must be at least 1")
    if name in BELOW_ONE and not 0 <= value < 1:
        raise DclsConvertError(f"{number}: must be at least 0 and below 1")
    if name == "temperature" and not 0 < value < math.inf:
        raise DclsConvertError(f"{number}: must be above 0")
    if not 0 <= value < math.inf:
        raise DclsConvertError(f"{number}: must be at least 0")
