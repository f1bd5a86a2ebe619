"""A run that trains a LoRA adapter: real processes; what travels is small, and what was learned can be merged."""

import json

import numpy as np
import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quickstart.prepare import Prepared
from tests.e2e.runs import assert_balanced, penstock, running, small_run
from tests.helpers.models.tiny_model import make_tiny_model

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NUM_STEPS = 4


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n)}) + "\n" for n in range(64)))
    return Prepared(model_dir=make_tiny_model(tmp_path / "model"), train_path=path, eval_path=path)


@pytest.mark.grid
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


def recomputed_logprobs(model, row):
    """Of a completion, by the plain model."""
    token_ids = [*row["prompt_token_ids"], *row["token_ids"]]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, len(row["prompt_token_ids"]) - 1 : -1]
    return torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(row["token_ids"])[:, None])[:, 0].numpy()


def largest_gap(model, rows):
    """Between what the engine sampled from and what a plain model says, nats."""
    return max(float(np.abs(recomputed_logprobs(model, row) - np.asarray(row["logprobs"])).max()) for row in rows)


@pytest.mark.vllm
@pytest.mark.grid
def test_vllm_samples_with_the_adapters_that_the_run_trains_and_drains_before_each(task, tmp_path):
    (tmp_path / "brevity.py").write_text("def brevity(completion: str) -> float:\n    return -float(len(completion))\n")
    document = small_run(
        task, tmp_path, run__num_steps=3, algorithm__max_staleness=1, optimizer__learning_rate=1e-2,
        generator__engine="vllm", generator__update_mode="drain", reward__model="brevity:brevity",
    )  # fmt: skip
    document |= {"lora": {"rank": 2, "alpha": 4.0}, "record": True}
    with running(document, tmp_path) as run:
        assert run.end() == 0, run.text
        folder, summary = run.folder, run.summary()
    assert_balanced(summary, num_samples=3 * 8 * 4)
    rows = [json.loads(line) for line in (folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert all(row["min_policy_version"] == row["max_policy_version"] for row in rows), "drained before an update"
    newest = max(row["max_policy_version"] for row in rows)
    rows = [row for row in rows if row["max_policy_version"] == newest]
    assert newest >= 1

    base = AutoModelForCausalLM.from_pretrained(task.model_dir, dtype=torch.float32)
    of_base = largest_gap(base, rows)
    model = PeftModel.from_pretrained(base, folder.checkpoints / "step_3")
    set_peft_model_state_dict(model, load_file(folder.path / "weights" / f"v{newest}-h0.safetensors"))
    gap = largest_gap(model.eval(), rows)
    assert gap < 1e-4
    assert of_base > 100 * gap
