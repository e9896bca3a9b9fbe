"""Checks before timm downloads: can the hub be reached, and does the repository have a config?"""

import contextlib
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator

from ..errors import DclsConvertError, ModelError
from ..text import one_line
from .registries import import_library


@contextlib.contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Put huggingface_hub in offline mode inside the block if DNS cannot resolve the hub's name.

    Otherwise it would retry for a minute. Behind a proxy nothing is checked, since the proxy
    resolves names itself.
    """
    from huggingface_hub import constants

    offline_before: bool = constants.HF_HUB_OFFLINE
    try:
        if not urllib.request.getproxies():
            socket.getaddrinfo(urllib.parse.urlsplit(constants.ENDPOINT).hostname, None)
    except OSError:
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline_before


@offline_if_unreachable()
def check_hub(name: str, *, offline: bool) -> None:
    """Raise ModelError if the hub (if `offline`, the local cache) has no config of the repository.

    timm would fetch the config itself, but `build_model` may call timm several times, and each call
    would have to fail first.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    timm = import_library("timm")
    repository = name.partition(":")[2]
    repository_id, _, revision = repository.partition("@")
    try:
        if not offline:
            timm.models.load_model_config_from_hf(repository)
            return
        cached = try_to_load_from_cache(repository_id, "config.json", revision=revision or None)
    except DclsConvertError:
        raise
    except Exception as error:  # from the hub, its HTTP client, or a config that is not JSON
        # For a missing file, the cause of huggingface_hub's error says why.
        reason: BaseException = error
        if isinstance(error, LocalEntryNotFoundError) and error.__cause__:
            reason = error.__cause__
        problem = f"{type(reason).__name__}: {one_line(reason)[:300]}"
        if isinstance(reason, RepositoryNotFoundError):
            problem = (
                f"{constants.ENDPOINT} has no such repository, "
                "or it is private and there is no token for it (HF_TOKEN)"
            )
        raise ModelError(f"{name}: cannot be built: {problem}") from error
    if not isinstance(cached, str):
        raise ModelError(
            f"{name}: its config is not in the local cache, and a dry run downloads nothing"
        )
