"""A task of five turns for a model of 80,000 parameters: each turn names a letter, and the next one is to be written.

The environment is an ordinary one of the SDK. A turn is one token, so that a step takes no time worth waiting for.
"""

from __future__ import annotations

import random
import string
from pathlib import Path

from penstock.environments import Action, Environment, Message, Opening, Outcome, Task

LETTERS = string.ascii_lowercase[:8]
VOCABULARY = ("<pad>", "<bos>", "<eos>", *LETTERS)
NUM_TURNS = 5


class NextLetter(Environment):
    """One for the letter after the one that was named last, around the end of the alphabet."""

    name = "next_letter"
    opens = True
    delay = 0
    """Turns after which a turn is paid for, the last ones together at the end."""

    async def reset(self, task: Task) -> Opening:
        """The letters follow from the seed: siblings are shown the same."""
        drawn = random.Random(task.seed)
        self.shown = [drawn.choice(LETTERS) for _ in range(NUM_TURNS)]
        self.earned: list[float] = []
        return Opening(messages=[Message(role="user", content=self.shown[0])])

    async def step(self, action: Action) -> Outcome:
        """What a turn earns depends on nothing but this turn."""
        wanted = LETTERS[(LETTERS.index(self.shown[action.turn]) + 1) % len(LETTERS)]
        self.earned.append(float(action.text == wanted))
        is_done = action.turn + 1 == NUM_TURNS
        due = len(self.earned) if is_done else max(0, len(self.earned) - self.delay)
        paid, self.earned = sum(self.earned[:due]), self.earned[due:]
        messages = [] if is_done else [Message(role="user", content=self.shown[action.turn + 1])]
        return Outcome(messages=messages, reward=paid, is_done=is_done)


class PaidLate(NextLetter):
    """The same, but each turn is paid two turns later."""

    delay = 2


def make_model(folder: Path, *, seed: int) -> None:
    """A Qwen2 with random weights and a tokenizer of one token a letter."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=VOCABULARY[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
