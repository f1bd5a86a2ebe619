from types import SimpleNamespace

import pytest

from tests.helpers.console import write_rows
from tests.helpers.models.tiny_model import make_tiny_model


@pytest.fixture
def tiny_task(tmp_path):
    """A model of random weights and additions: what is learned does not matter here."""
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(8) for b in range(8)]
    train = write_rows(tmp_path / "train.jsonl", *rows)
    (tmp_path / "brevity.py").write_text("def brevity(completion: str) -> float:\n    return -float(len(completion))\n")
    return SimpleNamespace(
        model_dir=make_tiny_model(tmp_path / "model", num_layers=4), train_path=train, eval_path=None
    )
