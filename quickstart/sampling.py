"""Samples in batches, as the transformers engine does, to measure the warm start.

Invariants:
- Sampling is at temperature 1 from the full distribution, or greedy; the seed decides all draws.
- A response counts only if it ended by itself; one cut off at the limit scores zero.
"""

from collections.abc import Sequence

from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from quickstart.arithmetic import Problem, extract_answer
from services.generator.engine.engine import FinishReason, SamplingSettings
from services.generator.engines.transformers.batch_decoder import BatchDecoder, Row

_MAX_NEW_TOKENS = 256


def sample_responses(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    prompts: Sequence[str],
    *,
    seed: int | None,
) -> list[str | None]:
    """Sample one response to each prompt.

    Args:
        model: The policy, in evaluation mode.
        tokenizer: The model's own.
        prompts: Texts of any lengths.
        seed: Decides the draws; None decodes greedily.

    Returns:
        One text per prompt, in order; None if the response did not end within the limit.
    """
    sampling = SamplingSettings(
        temperature=0.0 if seed is None else 1.0,
        max_new_tokens=_MAX_NEW_TOKENS,
        stop_token_ids=(tokenizer.eos_token_id,),
    )
    rows = [
        Row(request_id=prompt, token_ids=tokenizer.encode(prompt), num_left=_MAX_NEW_TOKENS, sampling=sampling)
        for prompt in prompts
    ]
    decoder = BatchDecoder(model, seed=seed or 0)
    decoder.join(rows)
    while decoder.rows:
        decoder.step()
    return [
        tokenizer.decode(row.new_token_ids[:-1]) if row.finish_reason is FinishReason.STOP else None for row in rows
    ]


def measure_accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    problems: Sequence[Problem],
    *,
    seed: int | None,
) -> float:
    """Share of problems answered exactly, one response each; greedy if `seed` is None."""
    texts = sample_responses(model, tokenizer, [problem.prompt for problem in problems], seed=seed)
    num_right = sum(
        text is not None and extract_answer(text) == problem.answer
        for text, problem in zip(texts, problems, strict=True)
    )
    return num_right / len(problems)
