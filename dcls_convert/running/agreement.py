"""How close the outputs of two networks are, as numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How close a new network's outputs for images are to the old one's.

    A number that is not defined for these outputs is None.
    """

    # Share of images for which both networks rank the same class first; only for classifiers.
    same_top1: float | None = None
    # Mean over images of KL(old || new) of the softmax of the class scores, in nats.
    kl: float | None = None
    # Share of images for which the same output of (N, C) is the largest; only for networks that do
    # not say whether they are classifiers.
    same_largest: float | None = None
    # `relative_error` of all floating-point tensors together
    output_error: float | None = None
