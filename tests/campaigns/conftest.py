import pytest

from .campaign import Campaign


@pytest.fixture
def campaign(request):
    """Named for its test."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    seconds, seed, first = (request.config.getoption(f"--{option}") for option in ("seconds", "seed", "first"))
    return Campaign(name=name, seconds=seconds, seed=seed, first=first)
