"""Read the record that a comparison writes into its folder."""

from dcls_convert.compare.comparison import COMPARISON_FILE, Comparison


def read_comparison(folder):
    return Comparison.from_json((folder / COMPARISON_FILE).read_bytes(), COMPARISON_FILE)
