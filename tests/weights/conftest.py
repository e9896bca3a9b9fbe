import pytest
import timm
import torch

from ..conftest import TINY


@pytest.fixture
def trained():
    """A network whose weights are no longer those of an initialisation."""
    torch.manual_seed(7)
    model = timm.create_model(TINY).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model
