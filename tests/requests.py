"""Requests from flat settings, for tests."""

from dataclasses import fields

from dcls_convert.conversion.request import ConversionRequest, NetworkRequest, StartRequest


def request_of(model, **settings):
    """Return a request; each setting goes into the part that has a field of this name."""
    parts = {}
    for name, part in {"network": NetworkRequest, "start": StartRequest}.items():
        own = {field.name for field in fields(part)} & settings.keys()
        parts[name] = {key: settings.pop(key) for key in own}
    return ConversionRequest(
        network=NetworkRequest(model=model, **parts["network"]),
        start=StartRequest(**parts["start"]),
        **settings,
    )
