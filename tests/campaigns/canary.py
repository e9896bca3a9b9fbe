"""A module that no data may import or call."""

CALLED = []


def build(**_):
    CALLED.append("build")
