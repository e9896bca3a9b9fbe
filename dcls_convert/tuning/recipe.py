"""How a network is trained."""

import math
from dataclasses import dataclass

from ..errors import DclsConvertError
from ..options import POSITION_LR_SCALE
from .param_groups import WEIGHT_DECAY

AT_LEAST_ONE = ("epochs", "batch_size", "accumulate")
BELOW_ONE = ("smoothing", "ema")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """AdamW, with `param_groups` for positions, and what is stated here.

    Raises:
        DclsConvertError: A value that no training can have.
    """

    epochs: int = 10
    batch_size: int = 32  # images in each process at once
    accumulate: int = 1  # batches of one update
    lr: float = 1e-3
    position_lr_scale: float = POSITION_LR_SCALE
    weight_decay: float = WEIGHT_DECAY  # of the weights; positions have none
    sched: str = "cosine"  # timm's name
    warmup_epochs: int = 1
    clip_grad: float = 1.0  # largest norm of the gradients; 0: as they are
    smoothing: float = 0.1  # of the labels
    mixup: float = 0.0
    cutmix: float = 0.0
    ema: float = 0.0  # decay of the averaged weights, which are tested; 0: no average
    repulsive: float = 0.0  # weight of the square of the repulsive loss, which keeps elements apart
    temperature: float = (
        4.0  # by which a student's and its teacher's outputs are divided before softmax
    )
    freeze_statistics: bool = False  # BatchNorm goes by those that it has: for few images
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in self.__slots__ if name != "sched"}
        for name, value in numbers.items():
            least, most = (1 if name in AT_LEAST_ONE else 0), (1 if name in BELOW_ONE else math.inf)
            if not least <= value < most or (name == "temperature" and value == 0):
                allowed = f"at least {least}" + (" and below 1" if most == 1 else "")
                raise DclsConvertError(f"{name.replace('_', ' ')} {value}: must be {allowed}")
        if (self.mixup or self.cutmix) and self.batch_size % 2:
            raise DclsConvertError(
                f"batch size {self.batch_size}: mixup and cutmix need an even one"
            )

    def update_size(self, processes: int) -> int:
        """Images of one update."""
        return self.batch_size * self.accumulate * processes
