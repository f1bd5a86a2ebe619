"""What the trainer's suites share. PyTorch is imported only where they ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def one_thread() -> None:
    """PyTorch's threads would wait for those of the test process beside this one."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    from tests.helpers.models.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("model"))
