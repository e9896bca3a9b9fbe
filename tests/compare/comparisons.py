"""Read the record that a comparison writes into its folder."""

from dcls_convert.compare.comparison import COMPARISON, Comparison


def read_comparison(folder):
    return Comparison.from_json((folder / COMPARISON).read_bytes(), COMPARISON)
