"""Samples in batches to measure the warm start: rows leave the batch, and the cache, as they end.

Invariants:
- Sampling is at temperature 1 from the full distribution, or greedy; the passed generator decides all draws.
- A response counts only if it ended by itself; one cut off at the limit scores zero.
"""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, Qwen2ForCausalLM, Qwen2Tokenizer

from quickstart.arithmetic import Problem, extract_answer

# Axes: B rows still decoding, P padded prompt length, V vocabulary.
_MAX_NEW_TOKENS = 256


def sample_responses(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    prompts: Sequence[str],
    *,
    generator: torch.Generator | None,
) -> list[str | None]:
    """Sample one response to each prompt.

    Args:
        model: The policy, in evaluation mode.
        tokenizer: Pads on the left.
        prompts: Texts of any lengths.
        generator: Source of randomness, or None for greedy decoding.

    Returns:
        One text per prompt, in order; None if the response did not end within the limit.
    """
    with torch.inference_mode():
        return _decode(model, tokenizer, prompts, generator)


def measure_accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[Problem],
    *,
    generator: torch.Generator | None,
) -> float:
    """Share of problems answered exactly, one response each; greedy if `generator` is None."""
    texts = sample_responses(model, tokenizer, [problem.prompt for problem in problems], generator=generator)
    num_right = sum(
        text is not None and extract_answer(text) == problem.answer
        for text, problem in zip(texts, problems, strict=True)
    )
    return num_right / len(problems)


def _pick(logits_BV: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial(logits_BV.softmax(dim=-1), 1, generator=generator).squeeze(1)


def _decode(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: Sequence[str], generator: torch.Generator | None
) -> list[str | None]:
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True)
    input_ids_BP, mask_BP = batch["input_ids"], batch["attention_mask"]
    position_ids_BP = (mask_BP.cumsum(dim=1) - 1).clamp(min=0)
    rows_B = torch.arange(len(prompts))
    responses: list[list[int]] = [[] for _ in prompts]
    texts: list[str | None] = [None] * len(prompts)
    cache = DynamicCache(config=model.config)
    for _ in range(_MAX_NEW_TOKENS):
        logits_BV = model(
            input_ids=input_ids_BP,
            attention_mask=mask_BP,
            position_ids=position_ids_BP,
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        tokens_B = _pick(logits_BV, generator)
        is_open_B = tokens_B != tokenizer.eos_token_id
        for row, token, is_open in zip(rows_B.tolist(), tokens_B.tolist(), is_open_B.tolist(), strict=True):
            if is_open:
                responses[row].append(token)
            else:
                texts[row] = tokenizer.decode(responses[row])
        if not is_open_B.any():
            break
        kept_B = is_open_B.nonzero().squeeze(1)
        if len(kept_B) < len(rows_B):
            cache.batch_select_indices(kept_B)
            rows_B, tokens_B, mask_BP = rows_B[kept_B], tokens_B[kept_B], mask_BP[kept_B]
            position_ids_BP = position_ids_BP[kept_B]
        input_ids_BP = tokens_B.unsqueeze(1)
        mask_BP = torch.cat([mask_BP, torch.ones_like(input_ids_BP)], dim=1)
        position_ids_BP = position_ids_BP[:, -1:] + 1
    return texts
