"""A run that trains a LoRA adapter: real processes; what travels is small, and what was learned can be merged."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from console.quickstart.prepare import Prepared
from tests.e2e.runs import assert_balanced, penstock, running, small_run
from tests.helpers.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NUM_STEPS = 4


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(64)))
    return Prepared(model_dir=make_tiny_model(tmp_path / "model"), train_path=path, eval_path=path)


def test_an_adapter_is_trained_published_saved_and_merged(task, tmp_path):
    document = small_run(task, tmp_path, run__num_steps=NUM_STEPS, optimizer__learning_rate=1e-2)
    # All rewards are alike: the decay alone moves the adapter.
    document["optimizer"]["weight_decay"] = 1.0
    document["lora"] = {"rank": 2, "alpha": 4.0}
    with running(document, tmp_path) as run:
        assert run.end() == 0, run.text
        folder, summary = run.folder, run.summary()
    assert_balanced(summary, num_samples=NUM_STEPS * 8 * 4)
    assert summary["max_staleness_seen"] <= 1
    whole_bytes = (task.model_dir / "model.safetensors").stat().st_size
    published = list((folder.path / "weights").glob("v*.safetensors"))
    fetched = list(folder.cache.rglob("v*.safetensors"))
    assert published
    assert fetched
    assert max(path.stat().st_size for path in [*published, *fetched]) < 0.1 * whole_bytes

    checkpoint = folder.checkpoints / f"step_{NUM_STEPS}"
    assert not (checkpoint / "model.safetensors").exists()
    with penstock("merge", str(checkpoint), "--out", "merged", cwd=tmp_path, run_dir=folder.path) as merge:
        assert merge.end(timeout_s=120) == 0, merge.text
    base = AutoModelForCausalLM.from_pretrained(task.model_dir, dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    ids = torch.tensor([[5, 17, 30, 8, 21]])
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base, checkpoint)(input_ids=ids).logits
        torch.testing.assert_close(merged(input_ids=ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert (
        load_file(tmp_path / "merged" / "model.safetensors").keys()
        == load_file(task.model_dir / "model.safetensors").keys()
    )
