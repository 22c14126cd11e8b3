"""What the engine's tests share."""

import pytest
import torch


@pytest.fixture
def one_thread():
    """Small models are slower on two."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
