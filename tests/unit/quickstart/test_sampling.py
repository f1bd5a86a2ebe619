"""The batched sampler against one-at-a-time decoding."""

import random
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from quickstart.arithmetic import Problem, sample_distinct_problems, write_working
from quickstart.sampling import measure_accuracy, sample_responses
from quickstart.tiny_model import build_model, build_tokenizer


class Scripted:
    """Stands in for a model that knows every problem's working by heart, or gets each one wrong."""

    def __init__(self, tokenizer: Qwen2Tokenizer, problems: list[Problem], *, is_right: bool) -> None:
        self.texts: list[list[int]] = []
        for problem in problems:
            working = write_working(problem, rng=random.Random(0)) + ("" if is_right else "0")
            self.texts.append([*tokenizer.encode(problem.prompt + working), tokenizer.eos_token_id])
        self.seen: list[list[int]] = []

    def batch_select_indices(self, _indices: torch.Tensor) -> None:
        """Its rows leave by themselves."""

    def __call__(self, *, input_ids: torch.Tensor, attention_mask: torch.Tensor, **_: object) -> SimpleNamespace:
        if not self.seen:
            rows = zip(input_ids.tolist(), attention_mask.tolist(), strict=True)
            self.seen = [[i for i, is_real in zip(ids, mask, strict=True) if is_real] for ids, mask in rows]
        logits = torch.full((len(input_ids), 1, 300), -1e9)
        for row, text in enumerate(self.texts):
            logits[row, 0, text[len(self.seen[row])]] = 0.0
            self.seen[row].append(text[len(self.seen[row])])
        open_rows = [row for row, text in enumerate(self.texts) if len(self.seen[row]) < len(text)]
        self.texts = [self.texts[row] for row in open_rows]
        self.seen = [self.seen[row] for row in open_rows]
        return SimpleNamespace(logits=logits, past_key_values=self)


def greedy_by_hand(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompt: str) -> str | None:
    """Decode without batch, padding or cache."""
    ids = tokenizer.encode(prompt)
    start = len(ids)
    for _ in range(256):
        with torch.inference_mode():
            token = int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
        if token == tokenizer.eos_token_id:
            return str(tokenizer.decode(ids[start:]))
        ids.append(token)
    return None


def test_batched_greedy_decoding_equals_one_at_a_time() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    # An untrained model rarely stops: a bias-like push makes rows end at different lengths.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 4
    prompts = ["a1 b2=", "a12 b7 c9=", "a40 b1 c1 d1="]
    batched = sample_responses(model, tokenizer, prompts, seed=None)
    assert batched == [greedy_by_hand(model, tokenizer, prompt) for prompt in prompts]


@pytest.mark.slow
def test_sampling_follows_from_the_seed() -> None:
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).eval()
    # As above, so that rows end.
    with torch.no_grad():
        model.lm_head.weight[tokenizer.eos_token_id] *= 4
    draws = [sample_responses(model, tokenizer, ["a1 b2="] * 4, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert len(draws[0]) == 4


def test_accuracy_counts_exact_answers() -> None:
    tokenizer = build_tokenizer()
    problems = sample_distinct_problems(random.Random(0), held_out=True, num_problems=6)
    for is_right, accuracy in ((True, 1.0), (False, 0.0)):
        scripted = Scripted(tokenizer, problems, is_right=is_right)
        assert measure_accuracy(scripted, tokenizer, problems, seed=None) == accuracy  # type: ignore[arg-type]
