"""One PyTorch thread: models this small gain nothing from a second one, and the tests share the machine."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
