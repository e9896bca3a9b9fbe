"""Constants of a calibration, with their units and sources."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSettings:
    """How images are sampled, and the weight of each term of the objective in `solve_layer.py`.

    The letters a, b, c, d and s are those of the objective. The values were chosen by
    benchmarks/pretrained.py on a trained EfficientNet-Lite0, unless another benchmark is named.
    """

    # Where images are sampled.
    # Approximate number of samples per image. Neighbouring places are alike, so 64 to 256 samples
    # give the same weights.
    samples_per_image: int = 128
    # From image to image, the first sample moves by this many places along the second axis; by 1
    # along the first axis, and by the square along the third.
    shift_between_images: int = 7

    # The objective.
    # a: does not depend on the number of samples; keeps a kernel close to the old one where inputs
    # do not vary.
    kernel_prior: float = 1e-2
    # Part of s. With this many samples per cell of an output channel, the old kernel weighs as much
    # as the images; one sample per cell just determines a kernel. The weight of the old kernel
    # falls with the square of the number of samples. Without the square, kernels with many samples
    # were pulled to the old ones, too: benchmarks/calibration.py --few.
    samples_of_old_kernel: float = 1.0
    # A layer with fewer samples keeps its fit: the statistics of one or two images do not carry
    # over to others.
    min_samples: int = 16
    # Lower bound on the variance of an input, as a share of the mean variance of all inputs.
    min_input_variance: float = 1e-3
    # The next two are for depthwise layers alone, since means and covariances differ from the few
    # images of a calibration to others.
    # b, per sample of an image. An error of the mean response is the same at all places, so it adds
    # up where later layers sum over places (global pooling), while other errors cancel. With 100,
    # kernels of few elements on maps of a few pixels fitted nothing else:
    # benchmarks/calibration.py --few.
    mean_patch_weight: float = 1.0
    # c: correlations that all channels share carry over to other images.
    shared_correlation: float = 0.2
    ridge: float = 1e-4  # d: bounds the weights of elements that nearly coincide

    # Number of images that run through the old and the new network in one pass. Their activations
    # take most of the memory of a calibration. Parts of 64 images bring outputs as close as all
    # images at once: benchmarks/calibration.py --many.
    images_per_pass: int = 64

    # Conjugate gradients. More steps fit the noise of few images.
    max_steps: int = 5
    min_residual: float = 1e-4  # share of the first residual, in the norm of the preconditioner

    # With fewer samples per weight of an output channel, the report gives this as a reason for the
    # layer's error. A rule of thumb; it changes no result.
    samples_per_weight_to_warn: float = 2.0


# Block sizes. They change results only by the order of summation.

# Size of the tensor of patches. Allocating a larger tensor takes as long as filling it.
PATCH_FLOATS_AT_ONCE = 1 << 20
ROWS_AT_ONCE = 256  # rows computed at once in the product of one large matrix
