"""Networks of a user's own and their checkpoints; small, since exporters are slow."""

import torch
from torch import nn

from dcls_convert import apply_plan_, find_convs, plan_conversion, save_converted
from dcls_convert.networks.building import build_model
from dcls_convert.networks.source import ModelSource

from ..checkpoints.folders import IMAGE


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.stage = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1, groups=3) for _ in range(2)])

    def forward(self, x):
        return self.stage(x)


class ByImage(Plain):
    """A network whose graph depends on the number of images."""

    def forward(self, x):
        return torch.stack([self.stage(image) * (1 + index) for index, image in enumerate(x)])


class Branching(Plain):
    """A network whose outputs are nested in dicts, lists and tuples."""

    def forward(self, x):
        y = self.stage(x)
        return {"maps": [y, y[:, :1] * 2], "mean": (y.mean((2, 3)), None)}


def checkpoint_of(factory, folder):
    name = f"{factory.__module__}:{factory.__name__}"
    model = build_model(ModelSource(name=name), trust_code=True)
    plan = plan_conversion(find_convs(model, IMAGE), dilated_size=5, model=name)
    apply_plan_(
        model, plan, init="random", positions="uniform", generator=torch.Generator().manual_seed(0)
    )
    return save_converted(model.eval(), plan, folder)
