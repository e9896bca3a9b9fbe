"""Networks that take anything but one image, and example inputs of each."""

import torch
from torch import nn

IMAGE = (3, 16, 16)
MASK = (1, 16, 16)


class Base(nn.Module):
    """A stem, and a stage of two depthwise convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 6, 1)
        self.stage = nn.Sequential(*[nn.Conv2d(6, 6, 3, padding=1, groups=6) for _ in range(2)])


class OneImage(Base):
    """Takes the image and the mask of `TwoImages` as one tensor."""

    def __init__(self) -> None:
        super().__init__(4)

    def forward(self, image):
        return self.stage(self.stem(image))


class TwoImages(OneImage):
    def forward(self, image, mask):
        return super().forward(torch.cat([image, mask], 1))


class ByKeyword(TwoImages):
    def forward(self, image, *, mask):
        return super().forward(image, mask)


class ThreeInputs(Base):
    """Takes an image, integers, and a number for each image; returns a dict."""

    def __init__(self) -> None:
        super().__init__(3)
        self.embed = nn.Embedding(5, 6)

    def forward(self, image, label, time):
        x = self.stem(image * time[:, None, None, None]) + self.embed(label)[:, :, None, None]
        return {"map": self.stage(x), "mean": x.mean((2, 3))}


class Signal(nn.Module):
    """Takes (batch, samples)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, 6, 5, stride=2)
        self.stage = nn.Sequential(*[nn.Conv1d(6, 6, 3, padding=1, groups=6) for _ in range(2)])

    def forward(self, samples):
        return self.stage(self.stem(samples.unsqueeze(1)))


EXAMPLES = {
    TwoImages: (torch.zeros(1, *IMAGE), torch.zeros(1, *MASK)),
    ByKeyword: {"image": torch.zeros(1, *IMAGE), "mask": torch.zeros(1, *MASK)},
    ThreeInputs: (torch.zeros(2, *IMAGE), torch.tensor([1, 4]), torch.zeros(2)),
    Signal: torch.zeros(1, 200),
}
