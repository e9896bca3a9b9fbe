import pytest
import torch


@pytest.fixture
def seeded():
    """Seed torch's generator, from which networks and inputs get their values."""
    torch.manual_seed(0)
