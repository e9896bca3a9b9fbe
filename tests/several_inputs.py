"""Networks whose forward takes several tensors by position, and the sizes of these."""

import torch
from torch import nn

IMAGE = (3, 16, 16)
MASK = (1, 16, 16)
VECTOR = (5,)


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


class Optional(Base):
    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, image, mask=None):
        x = self.stem(image)
        if mask is not None:
            x = x * mask
        return self.stage(x)


class ImageAndVector(Base):
    def __init__(self) -> None:
        super().__init__(3)
        self.embed = nn.Linear(5, 6)

    def forward(self, image, vector):
        x = self.stem(image) + self.embed(vector)[:, :, None, None]
        return {"map": self.stage(x), "mean": x.mean((2, 3))}


class ThreeInputs(ImageAndVector):
    def forward(self, image, vector, time):
        return super().forward(image * time[:, None, None, None], vector)


class AnyNumber(TwoImages):
    def forward(self, *images):
        return super().forward(*images)


class ByKeyword(TwoImages):
    def forward(self, image, *, mask):
        return super().forward(image, mask)


class InADict(TwoImages):
    def forward(self, inputs):
        return super().forward(inputs["image"], inputs["mask"])


SIZES = {
    TwoImages: (IMAGE, MASK),
    Optional: (IMAGE, MASK),
    ImageAndVector: (IMAGE, VECTOR),
    ThreeInputs: (IMAGE, VECTOR, ()),  # one number for each image
    AnyNumber: (IMAGE, MASK),
}
