"""What is scored is what the token ids say, whatever text came with them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from penstock.clients.sample_stream import MAX_TEXT_BYTES
from penstock.config import ConfigError
from penstock.v1 import broker_pb2, reward_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from services.reward.config import RewardConfig, RewardModelConfig
from services.reward.models.build import build_model
from services.reward.pool import ScoringPool
from services.reward.server import serve
from services.reward.texts import TokenTexts
from tests.helpers.models.tokenizer_kinds import letters
from tests.unit.reward.test_pool import FakeModel, FakeSource, run_pool

A, B = 2, 3


def lease(*token_ids, sent, number=0, generator_id="gen-2", runs=()):
    item = reward_pb2.ScoreItem(
        key=types_pb2.SampleKey(group_id="g", sample_index=number),
        completion_text=sent,
        token_ids=int32_bytes(token_ids),
    )
    return broker_pb2.ScoringLease(lease_id=str(number), item=item, generator_id=generator_id, loss_mask_runs=runs)


@pytest.fixture
def texts(tmp_path):
    letters(tmp_path)
    return TokenTexts.of_model(tmp_path)


def counted(sent):
    return REGISTRY.get_sample_value("penstock_reward_texts_total", {"sent": sent}) or 0


@pytest.mark.parametrize(
    ("sent", "token_ids", "outcome"),
    [("a b", (A, B), "same"), ("#### 4", (A, B), "differing"), ("", (A, B), "not_sent"), ("#### 4", (), "differing")],
)
async def test_the_text_is_that_of_the_tokens_and_the_difference_is_counted(texts, sent, token_ids, outcome):
    before, one = counted(outcome), lease(*token_ids, sent=sent)
    assert await texts.read([one]) == {}
    assert one.item.completion_text == ("a b" if token_ids else "")
    assert counted(outcome) == before + 1
    assert bool(texts.warning) == (outcome == "differing")


async def test_differences_are_logged_within_limits_with_the_generator_and_where_they_begin(tmp_path):
    letters(tmp_path)
    now_s = 100.0
    made = TokenTexts.of_model(tmp_path, monotonic_s=lambda: now_s)
    with capture_logs() as logs:
        await made.read([lease(A, B, sent="a lie", number=number) for number in range(5)])
        now_s += 60
        await made.read([lease(A, B, sent="a b"), lease(A, B, sent="a lie", number=5)])
    assert len(logs) == 2
    assert [logs[1][name] for name in ("generator_id", "at_character", "sent", "decoded")] == ["gen-2", 2, "lie", "b"]
    assert made.warning.startswith("6 of 7 texts were not what their tokens say")
    assert made.warning.endswith("the latest is g/5 of gen-2")


async def test_a_token_that_the_model_does_not_know_is_no_score_and_no_zero(texts):
    source, seen = FakeSource(0), []
    for number, one in enumerate([lease(A, sent="a"), lease(A, 4, sent="a", number=1), lease(B, sent="b", number=2)]):
        source.held[str(number)] = one
        source._queue.put_nowait(one)

    def behave(items):
        seen.extend(item.completion_text for item in items)
        return [1.0] * len(items)

    await run_pool(source, FakeModel(behave), lambda: not source.held, texts=texts)
    statuses = [source.scores[number].status for number in range(3)]
    assert statuses == [types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_INVALID, types_pb2.SCORE_STATUS_OK]
    assert not source.scores[1].HasField("value")
    assert source.scores[1].message == "token_ids: 4 is none of the 4 that the run's model knows"
    assert seen == ["a", "b"]


async def test_built_in_rewards_see_what_the_model_wrote_and_no_word_of_its_environment(texts):
    """Of a session that opens with an environment's words, whose text the generator sent as a whole."""
    parts = [
        {"model": "length", "length": {"target_tokens": 3}},
        {"model": "ngram_repetition", "ngram_repetition": {"n": 1, "unit": "tokens"}},
    ]
    model, before = build_model(RewardModelConfig.model_validate(parts)), counted("same")
    session = lease(B, B, A, A, B, B, B, B, A, sent="b b a a b b b b a", runs=[0, 2, 2, 4, 1])
    [result] = await ScoringPool(model=model, config=RewardModelConfig(), texts=texts).score([session])
    assert dict(result.score.components) == pytest.approx({"length": 0.0, "ngram_repetition": -2 / 3})
    assert (session.item.completion_text, counted("same")) == ("a a\na", before + 1)
    assert [turn.content for turn in session.item.completion_turns] == ["b b", "a a", "b b b b", "a"]
    assert {turn.role for turn in session.item.completion_turns[::2]} == {"environment"}


@pytest.mark.parametrize("runs", [(1,), (1, 2), (1, 0, 1), (0, 1, 0, 1)])
async def test_runs_that_are_those_of_no_mask_are_no_score(texts, runs):
    assert "loss_mask_runs: " in (await texts.read([lease(A, B, sent="", runs=runs)]))["0"]


async def test_idle_rows_of_the_model_are_tokens_that_say_nothing(tmp_path):
    letters(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    made, idle, beyond = TokenTexts.of_model(tmp_path), lease(A, 7, B, sent="a b"), lease(8, sent="", number=1)
    assert list(await made.read([idle, beyond])) == ["1"]
    assert idle.item.completion_text == "a b"


async def test_leases_can_be_renewed_while_a_long_completion_is_decoded():
    decoding, renewed = threading.Event(), threading.Event()

    class Slow:
        def decode(self, token_ids):
            decoding.set()
            return "a" if renewed.wait(timeout=30) else "the event loop stood still"

    one = lease(A, sent="a")
    reading = asyncio.create_task(TokenTexts(Slow(), vocab_size=4).read([one]))
    await asyncio.to_thread(decoding.wait)
    renewed.set()
    await reading
    assert one.item.completion_text == "a"


async def test_tokens_that_break_the_tokenizer_cost_their_own_sample_only():
    class Broken:
        def decode(self, token_ids):
            if token_ids == [A]:
                raise BaseException("panicked")  # as a panic of the library is
            return "b"

    good = lease(B, sent="b", number=1)
    faults = await TokenTexts(Broken(), vocab_size=4).read([lease(A, sent="a"), good])
    assert faults == {"0": "token_ids: cannot be decoded: BaseException: panicked"}
    assert good.item.completion_text == "b"


async def test_a_text_longer_than_a_message_takes_is_cut_as_generators_cut_it():
    class Wordy:
        def decode(self, token_ids):
            return "x" + "\u00e9" * MAX_TEXT_BYTES

    one = lease(A, sent="x")
    await TokenTexts(Wordy(), vocab_size=4).read([one])
    assert len(one.item.completion_text.encode()) == MAX_TEXT_BYTES - 1


def test_a_worker_without_tokenizer_has_to_say_that_it_trusts():
    with pytest.raises(ValueError, match=r"tokenizer_path: required: .*reward\.trusts_generator_text=true"):
        RewardConfig(run_id="r")
    assert RewardConfig(run_id="r", reward={"trusts_generator_text": True}).tokenizer_path is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "tokenizer.model",
            "",
            r"tokenizer_path: .*: holds no tokenizer.json; .*save_pretrained.*trusts",
        ),
        ("tokenizer.json", "{", r"tokenizer_path: .*tokenizer.json: not a tokenizer: "),
    ],
)
async def test_a_folder_without_usable_tokenizer_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as refused:
        await serve(RewardConfig(run_id="r", listen="127.0.0.1:0", tokenizer_path=tmp_path))
    assert "\n" not in str(refused.value)
