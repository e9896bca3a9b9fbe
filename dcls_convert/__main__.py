"""`python -m dcls_convert`."""

from .cli.app import main

main()
