"""Which paddings centre a kernel."""

from dcls_convert.geometry import keeps_centre

# cells before and after, extent, stride
CENTRED = [
    ((1, 1), 3, 1),
    ((3, 3), 7, 2),
    ((2, 2), 7, 4),  # PoolFormer's patches overlap by 3 cells
    ((1, 1), 4, 1),
    ((2, 2), 4, 1),
    ((0, 0), 1, 1),
    ((0, 1), 3, 2),  # TensorFlow's SAME padding
]


OFF_CENTRE = [
    ((0, 0), 3, 1),
    ((1, 1), 2, 1),
    ((2, 2), 11, 4),
    ((1, 1), 1, 1),
    ((2, 0), 3, 1),
    ((1, 0), 2, 1),
]


def test_padding_of_half_the_kernel_keeps_the_centre():
    for numbers in CENTRED:
        assert keeps_centre(*numbers), numbers
    for numbers in OFF_CENTRE:
        assert not keeps_centre(*numbers), numbers
