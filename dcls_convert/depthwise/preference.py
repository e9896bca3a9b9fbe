"""The environment variable with which users choose how depthwise convolutions are computed."""

import functools
import os
from typing import Literal, cast, get_args

from torch.compiler import assume_constant_result

from ..errors import DclsConvertError
from ..text import did_you_mean, shortened

Preference = Literal["auto", "torch", "blocks", "products"]
VARIABLE = "DCLS_CONVERT_DEPTHWISE"


# torch.compile can neither trace this function nor use a cache.
@assume_constant_result  # type: ignore[untyped-decorator]
def preference() -> Preference:
    """Return the value of the environment variable DCLS_CONVERT_DEPTHWISE.

    Raises:
        DclsConvertError: The value is not one of `Preference`.
    """
    return _preference()


@functools.cache
def _preference() -> Preference:
    value = os.environ.get(VARIABLE) or "auto"
    allowed = get_args(Preference)
    if value not in allowed:
        hint = did_you_mean(value, allowed)
        raise DclsConvertError(
            f"environment: {VARIABLE}={shortened(value)!r} must be "
            f"{', '.join(allowed[:-1])} or {allowed[-1]}{hint}"
        )
    return cast(Preference, value)
