import pytest

from .campaign import Campaign


@pytest.fixture
def campaign(request):
    """Named for its test."""
    name = request.node.name.removeprefix("test_").replace("_", " ")
    return Campaign(name=name, seconds=request.config.getoption("--seconds"), seed=request.config.getoption("--seed"))
