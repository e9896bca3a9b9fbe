"""The constants of a calibration, with their units and where they come from."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationSettings:
    """Unless stated, measured by benchmarks/pretrained.py on a trained EfficientNet-Lite0.

    The letters are those of the objective in `solution.py`.
    """

    # Where images are sampled.
    # About so many; neighbours say much the same: 64 to 256 give the same weights.
    places_per_image: int = 128
    # Places by which the first one moves from image to image along the second axis; along the
    # third, its square.
    shift_between_images: int = 7

    # The objective.
    # a, with any number of places; keeps a kernel close to the old one where the images have no
    # energy.
    damping: float = 1e-2
    # What a grows by where places are few: by the square of so many times the cells of an output
    # channel, over the places. One place a cell just determines a kernel, so there the old kernel
    # weighs as much as the images. Without the square, many places were pulled, too:
    # benchmarks/calibration.py --few.
    places_of_old_kernel: float = 1.0
    # A layer that is sampled at fewer places keeps its fit. Of one or two images, its means and
    # variances are theirs alone.
    min_places: int = 16
    min_energy: float = 1e-3  # share of the mean energy of all inputs that each input counts with
    # Of depthwise layers alone: other images have other means and covariances than these few.
    # b, for each sampled place of an image. An error of the mean response is the same at all
    # places, so it adds up in the sums over places that follow (global pooling); other errors
    # cancel. 100 on maps of a few pixels left kernels of few elements nothing else to fit:
    # benchmarks/calibration.py --few.
    mean_patch_weight: float = 1.0
    # c; what all channels of a layer see alike holds for other images
    shared_correlation: float = 0.2
    ridge: float = 1e-4  # d; bounds elements that nearly coincide

    # So many go through the network in step, as both networks: what it holds of them is most of the
    # memory that a calibration takes. In parts of 64, outputs of many images are as close as with
    # all at once: benchmarks/calibration.py --many.
    images_in_step: int = 64

    # Conjugate gradients. More steps fit the noise of few images.
    max_steps: int = 5
    min_residual: float = 1e-4  # of the first one, in the norm of the preconditioner

    # Sampled places for each weight of an output channel. With fewer, the report gives them as a
    # reason for the layer's error; a rule of thumb, which changes no result.
    few_places: float = 2.0


# Sizes of blocks. They change no result but for the order of sums.
# Of patches; the system takes as long to give larger tensors as to fill them.
PATCH_FLOATS_AT_ONCE = 1 << 20
ROWS_AT_ONCE = 256  # of the product of one large matrix
