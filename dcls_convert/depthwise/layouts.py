"""Memory formats of feature maps, and of the blocks that they are cut into."""

from torch import Tensor

BLOCK_SIDE = 8  # cells
MAX_OFFSET = 2**31  # blocks compute with 32 bits inside an image, and inside a channel


def is_channels_last(maps: Tensor) -> bool:
    """True if feature maps (N, C, H, W), or slices of them, are channels_last and not contiguous.

    Maps of one channel or one cell are both, so they give False.
    """
    return maps.stride(1) == 1 and not maps.is_contiguous()
