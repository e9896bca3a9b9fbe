"""Numbers that say how close the outputs of two networks are."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Agreement of a new network's outputs for images with the old network's.

    A number that these outputs do not define is None.
    """

    # Share of images for which both networks rank the same class first; only for classifiers.
    same_top1: float | None = None
    # Mean over images of KL(old || new) of the softmax of the class scores, in nats.
    kl: float | None = None
    # Share of images for which both networks have their largest of C outputs (N, C) at the same
    # index; only for networks that do not say whether they are classifiers.
    same_largest: float | None = None
    # `relative_error` of all floating-point tensors together
    output_error: float | None = None
