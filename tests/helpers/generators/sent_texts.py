"""Texts that a generator sends, against what the reward worker makes of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from penstock.v1 import broker_pb2, reward_pb2
from penstock.wire.codec import int32_bytes
from services.reward.texts import TokenTexts
from tests.helpers.brokers.scripted_generation import Sample, prompt
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.models.tiny_model import EOS_ID, VOCAB_SIZE

MAX_TOKENS = 40


def cut_characters(folder: Path) -> None:
    """A tokenizer of the tiny model's size whose tokens are bytes of longer characters; the end token is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[-VOCAB_SIZE:]
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([alphabet[EOS_ID]])
    made.save(str(folder / "tokenizer.json"))


def submit(bench: Bench) -> list[Sample]:
    """A group, and a sample that another generator began."""
    samples = bench.broker.submit(prompt("texts", max_new_tokens=MAX_TOKENS, group_size=8))
    return samples + bench.broker.submit(prompt("continued", max_new_tokens=MAX_TOKENS), prefix=(9, 11, 30))


async def assert_said_by_their_tokens(samples: Sequence[Sample], model_path: Path) -> None:
    """Each text is what the tokens say, characters that a span cut in two included."""
    texts = TokenTexts.of_model(model_path)
    items = [reward_pb2.ScoreItem(completion_text="?", token_ids=int32_bytes(sample.token_ids)) for sample in samples]
    leases = [broker_pb2.ScoringLease(lease_id=str(number), item=item) for number, item in enumerate(items)]
    assert await texts.read(leases) == {}
    assert [lease.item.completion_text for lease in leases] == [sample.text for sample in samples]
    assert any("\ufffd" in sample.text for sample in samples), "no character was cut"
    assert len({sample.text for sample in samples}) > 1
