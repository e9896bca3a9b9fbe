"""`python -m dcls_convert`."""

from .cli import main

main()
