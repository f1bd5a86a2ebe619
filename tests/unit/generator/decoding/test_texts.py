"""A generator's text is what a reward worker makes of the same tokens, with every kind of tokenizer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from services.generator.engine.engine import FinishReason
from services.generator.engine.model_files import load_text_decoder
from services.reward.texts import TokenTexts
from tests.helpers.generators.scripted_engine import span
from tests.helpers.models.tokenizer_kinds import KINDS
from tests.helpers.waiting import until
from tests.unit.generator.decoding.test_sample_runner import Bench

IDLE_ROWS = 3
"""Tokens of a model that its tokenizer does not know."""


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    request.param(folder)
    return folder


async def generated(model_path: Path, spans: list[list[int]], finish: FinishReason) -> str:
    """The text of a sample of which the first span was decoded under an earlier lease."""
    bench = Bench(text=load_text_decoder(model_path, is_tokenizer_needed=True))
    await bench.hold()
    prefix, *rest = spans
    await bench.begin(prefix=prefix, max_new_tokens=256)
    await bench.decoding()
    for index, token_ids in enumerate(rest):
        bench.engine.say("l", span(*token_ids, finish=finish if index == len(rest) - 1 else None))
    await until(lambda: bench.rollouts.num_free_slots() == 4)
    sent = bench.tokens.sent()
    await bench.rollouts.give_back_all(flush_timeout_s=0.1)
    return str(sent.text)


async def scored(model_path: Path, token_ids: list[int]) -> str:
    lease = broker_pb2.ScoringLease(
        lease_id="l",
        item=reward_pb2.ScoreItem(
            key=types_pb2.SampleKey(group_id="g"), completion_text="a lie", token_ids=int32_bytes(token_ids)
        ),
    )
    texts = TokenTexts.of_model(model_path)
    texts._vocab_size += IDLE_ROWS
    assert await texts.read([lease]) == {}
    return str(lease.item.completion_text)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_both_say_the_same_and_what_transformers_says(model_path: Path, data: st.DataObject) -> None:
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    token = st.integers(0, tokenizer.get_vocab_size() + IDLE_ROWS - 1)
    spans = data.draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=2, max_size=4))
    finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    token_ids = [token_id for part in spans for token_id in part]

    said = asyncio.run(generated(model_path, spans, finish))
    assert asyncio.run(scored(model_path, token_ids)) == said
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(model_path / "tokenizer.json"), clean_up_tokenization_spaces=False
    )
    assert said == theirs.decode(token_ids, skip_special_tokens=True)
