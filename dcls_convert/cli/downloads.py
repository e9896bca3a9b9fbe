"""Let downloads from a server that does not answer fail within seconds."""

import socket

PATIENCE = 10  # seconds without an answer; huggingface_hub's own default for one request


def limit_waiting(model: str) -> None:
    """Make this process give up on servers that do not answer a download for the model.

    The hub's client would ask six times for each file, with a warning and a wait after each. So ask
    the hub once; if it does not answer, the client reads its cache alone, as with HF_HUB_OFFLINE=1.
    """
    from huggingface_hub import constants, get_session, utils

    socket.setdefaulttimeout(PATIENCE)  # of torchvision's downloads, which else wait for ever
    if model.startswith("torchvision:") or constants.HF_HUB_OFFLINE:
        return
    try:
        answers = get_session().head(constants.ENDPOINT, timeout=PATIENCE).status_code < 500
    except Exception:  # of requests, httpx or httpx2: whichever library this version uses
        answers = False
    if not answers:
        constants.HF_HUB_OFFLINE = True
        if hasattr(utils, "reset_sessions"):  # before 1.0: a session begun online stays online
            utils.reset_sessions()
