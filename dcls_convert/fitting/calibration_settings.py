"""The constants of a calibration, with their units and where they come from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSettings:
    """How images are sampled, and how much each term of the objective in `solve_layer.py` counts.

    The letters are those of the objective. The numbers were measured by benchmarks/pretrained.py on
    a trained EfficientNet-Lite0, except where another benchmark is named.
    """

    # Where images are sampled.
    # Samples per image, about. Neighbouring places are alike: 64 to 256 give the same weights.
    samples_per_image: int = 128
    # Places by which the first sample moves from image to image along the second axis; along the
    # third, its square.
    shift_between_images: int = 7

    # The objective.
    # a, with any number of samples; keeps a kernel close to the old one where inputs do not vary.
    kernel_prior: float = 1e-2
    # In s. With this many samples for each cell of an output channel, the old kernel weighs as much
    # as the images; one sample a cell just determines a kernel. With more samples, its weight falls
    # by their square. Without the square, kernels with many samples were pulled, too:
    # benchmarks/calibration.py --few.
    samples_of_old_kernel: float = 1.0
    # A layer with fewer samples keeps its fit: the statistics of one or two images do not carry
    # over to others.
    min_samples: int = 16
    # The least variance that an input counts with, as a share of the mean variance of all inputs.
    min_input_variance: float = 1e-3
    # The next two are for depthwise layers alone: other images have other means and covariances
    # than these few.
    # b, for each sample of an image. An error of the mean response is the same at all places, so it
    # adds up in the sums over places that follow (global pooling); other errors cancel. 100 on maps
    # of a few pixels left kernels of few elements nothing else to fit:
    # benchmarks/calibration.py --few.
    mean_patch_weight: float = 1.0
    # c; a correlation that all channels share carries over to other images
    shared_correlation: float = 0.2
    ridge: float = 1e-4  # d; bounds the weights of elements that nearly coincide

    # Images that go through the old and the new network in step. What the networks hold of them is
    # most of the memory that a calibration takes. In parts of 64, outputs of many images are as
    # close as with all at once: benchmarks/calibration.py --many.
    images_in_step: int = 64

    # Conjugate gradients. More steps fit the noise of few images.
    max_steps: int = 5
    min_residual: float = 1e-4  # share of the first residual, in the norm of the preconditioner

    # Samples for each weight of an output channel. With fewer, the report gives them as a reason
    # for the layer's error; a rule of thumb, which changes no result.
    samples_per_weight_to_warn: float = 2.0


# Sizes of blocks. They change no result but for the order of sums.
# Memory for patches; the system takes as long to give larger tensors as to fill them.
PATCH_FLOATS_AT_ONCE = 1 << 20
ROWS_AT_ONCE = 256  # rows of the product of one large matrix
