"""Keep what libraries say about themselves from the user, who can do nothing about it."""

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings, no log records and nothing printed from inside the block. Errors go through."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
