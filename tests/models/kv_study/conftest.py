"""Every test of the study draws the same random numbers and, unless it asks for gradients, keeps no graph."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded_and_without_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield
