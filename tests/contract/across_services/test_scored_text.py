"""From a generator's tokens to what a reward model sees: the text that counts is the tokens', whoever sends another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from console.inspect.status import status_command
from penstock.network.rpc import Service, service_of
from penstock.v1 import broker_pb2, reward_pb2, reward_pb2_grpc, types_pb2
from penstock.wire.codec import int32_array
from services.broker.storage.memory_store import MemoryStore
from services.generator.engine.model_files import load_text_decoder
from services.generator.engines.base_config import ServedModel
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from services.reward.config import RewardConfig
from services.reward.server import serve
from tests.helpers.brokers import broker as real
from tests.helpers.generators.generator_bench import Bench
from tests.helpers.generators.sent_texts import assert_said_by_their_tokens, cut_characters, submit
from tests.helpers.models.tiny_model import make_tiny_model, write_perturbed
from tests.helpers.models.tokenizer_kinds import letters
from tests.helpers.serving import serving
from tests.helpers.waiting import until

A, B, UNKNOWN = 2, 3, 4
STOP = types_pb2.FINISH_REASON_STOP


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """A third party's reward model: pays for the letter b, and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: dict[str, str] = {}
        self.items: list[reward_pb2.ScoreItem] = []

    def service(self) -> Service:
        return service_of(self)

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        self.items += request.items
        self.seen |= {item.key.group_id: item.completion_text for item in request.items}
        ok = types_pb2.SCORE_STATUS_OK
        return reward_pb2.ScoreResponse(
            scores=[types_pb2.Score(status=ok, value=float("b" in item.completion_text)) for item in request.items]
        )

    async def GetRewardModel(
        self, request: reward_pb2.GetRewardModelRequest, context: object
    ) -> reward_pb2.GetRewardModelResponse:
        return reward_pb2.GetRewardModelResponse(name="judge", wants_token_ids=True)


@asynccontextmanager
async def scoring(broker: real.RunningBroker, **settings: object) -> AsyncIterator[Judge]:
    """A reward worker of the run as `penstock serve reward` runs it, over a judge."""
    judge = Judge()
    async with serving(judge.service()) as (_, target):
        trusts = {"trusts_generator_text": settings.pop("trusts_generator_text", False)}
        config = RewardConfig(
            listen="127.0.0.1:0",
            run_id=real.RUN,
            broker=f"127.0.0.1:{broker.server.port}",
            reward={"model": f"grpc://{target}", **trusts},
            **settings,
        )
        worker = asyncio.create_task(serve(config))
        try:
            yield judge
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


@pytest.fixture
async def broker() -> AsyncIterator[real.RunningBroker]:
    async with real.serving(MemoryStore()) as running:
        # A short lease is renewed often, and status hears of a worker when it renews.
        await running.open(groups_per_step=2, group_size=1, scoring_lease=real.duration(1.5))
        yield running


async def generate(broker: real.RunningBroker, said: dict[str, tuple[list[int], str]]) -> None:
    """A generator client of somebody else: every sample has these tokens and that text."""
    generator = real.Generator.connect(broker.channel, "gen-2")
    generator.beat(credits=len(said))
    for lease in await generator.leases(len(said)):
        tokens, text = said[lease.key.group_id]
        assert await generator.put(real.chunk(lease, tokens, finish=STOP, text=text)) == []


async def test_a_text_that_tokens_do_not_say_earns_nothing_in_training_and_in_evaluation(
    broker: real.RunningBroker, tmp_path: Path
) -> None:
    letters(tmp_path)
    await broker.submit(real.prompt("lie", group_size=1), real.prompt("truth", group_size=1), real.evaluation("eval"))
    await generate(broker, {"lie": ([A, A], "a b"), "truth": ([A, B], "a b"), "eval": ([A], "b")})
    async with scoring(broker, tokenizer_path=tmp_path) as judge:
        groups = await real.Trainer.connect(broker.channel).groups(2)
        await until(lambda: len(judge.seen) == 3)
    assert judge.seen == {"lie": "a a", "truth": "a b", "eval": "a"}
    trained = {group.prompt.group_id: group.trajectories[0] for group in groups}
    assert {name: sample.score.value for name, sample in trained.items()} == {"lie": 0.0, "truth": 1.0}
    assert int32_array(trained["lie"].token_ids, "token_ids").tolist() == [A, A]


async def test_status_names_the_generator_whose_texts_are_not_what_its_tokens_say(
    broker: real.RunningBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    letters(tmp_path)
    target = f"127.0.0.1:{broker.server.port}"
    await broker.submit(real.prompt("lie", group_size=1))
    await generate(broker, {"lie": ([A, A], "a b")})
    async with scoring(broker, tokenizer_path=tmp_path):

        async def is_told() -> bool:
            run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=real.RUN))
            return bool(run.reward_warnings)

        await real.eventually(is_told)
        show = partial(status_command, real.RUN, broker=target, runs_dir=Path("none"), is_watched=False)
        assert await asyncio.to_thread(show, as_json=False) == 0
        assert await asyncio.to_thread(show, as_json=True) == 0
    shown = " ".join(capsys.readouterr().out.split())
    told = "1 of 1 texts were not what their tokens say, which was scored instead"
    assert f"warning of reward-0: {told}" in shown
    assert f'"reward_warnings": {{"reward-0": "{told}' in shown
    assert shown.count("the latest is lie/0 of gen-2") == 2


async def test_a_worker_s_new_process_has_nothing_to_warn_of(broker: real.RunningBroker) -> None:
    async def warnings() -> dict[str, str]:
        run = await broker.call("GetRun", broker_pb2.GetRunRequest(run_id=real.RUN))
        return dict(run.reward_warnings)

    async def is_warned() -> bool:
        return await warnings() == {"worker-1": "2 of 3 texts"}

    async def is_not_warned() -> bool:
        return await warnings() == {}

    worker = real.Worker.connect(broker.channel)
    worker.stream.send(broker_pb2.StreamScoringRequest(warning="2 of 3 texts"))
    await real.eventually(is_warned)
    real.Worker.connect(broker.channel)
    await real.eventually(is_not_warned)


async def test_a_sample_of_unknown_tokens_is_dropped_by_name_and_never_a_zero(
    broker: real.RunningBroker, tmp_path: Path
) -> None:
    letters(tmp_path)
    await broker.submit(real.prompt("lie", group_size=1))
    await generate(broker, {"lie": ([A, UNKNOWN], "a b")})
    async with scoring(broker, tokenizer_path=tmp_path) as judge:

        async def is_dropped() -> bool:
            return dict((await broker.audit()).dropped) == {"reward_invalid": 1}

        await real.eventually(is_dropped)
    assert judge.seen == {}


async def test_a_worker_set_to_trust_generator_text_passes_it_on(broker: real.RunningBroker) -> None:
    await broker.submit(real.prompt("lie", group_size=1))
    await generate(broker, {"lie": ([A], "b")})
    async with scoring(broker, trusts_generator_text=True) as judge:
        await until(lambda: judge.seen == {"lie": "b"})


async def converse(broker: real.RunningBroker, group_id: str) -> None:
    """A generator's session: the model says a, its environment b, the model a once more."""
    generator = real.Generator.connect(broker.channel)
    generator.beat(credits=1)
    await broker.submit(real.prompt(group_id, group_size=1))
    [lease] = await generator.leases(1)
    assert await generator.put(real.chunk(lease, [A])) == []
    assert await generator.put(real.chunk(lease, [B, B], offset=1, loss_mask=b"\0\0")) == []
    assert await generator.put(real.chunk(lease, [A], offset=3, finish=STOP, text="a b b a")) == []


async def test_what_an_environment_said_is_no_part_of_the_completion(
    broker: real.RunningBroker, tmp_path: Path
) -> None:
    letters(tmp_path)
    await converse(broker, "session")
    async with scoring(broker, tokenizer_path=tmp_path) as judge:
        [group] = await real.Trainer.connect(broker.channel).groups(1)
    [item] = judge.items
    assert item.completion_text == "a\na"
    assert int32_array(item.token_ids, "token_ids").tolist() == [A, A]
    said = [(turn.role, turn.content) for turn in item.completion_turns]
    assert said == [("assistant", "a"), ("environment", "b b"), ("assistant", "a")]
    assert group.trajectories[0].score.value == 0.0
    assert int32_array(group.trajectories[0].token_ids, "token_ids").tolist() == [A, B, B, A]


async def test_without_a_tokenizer_a_session_is_not_scored_as_if_the_model_had_said_all_of_it(
    broker: real.RunningBroker,
) -> None:
    await converse(broker, "session")
    async with scoring(broker, trusts_generator_text=True) as judge:

        async def is_dropped() -> bool:
            return dict((await broker.audit()).dropped) == {"reward_invalid": 1}

        await real.eventually(is_dropped)
    assert judge.seen == {}


# --- our own generators -----------------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
async def test_what_a_generator_sends_is_what_its_tokens_say(tmp_path: Path) -> None:
    """The same of a vLLM engine is in tests/contract/engines/test_vllm_faults.py, on an engine that is there anyway."""
    bench = Bench(tmp_path)
    model_path = make_tiny_model(tmp_path / "model")
    cut_characters(model_path)
    bench.text = load_text_decoder(model_path, is_tokenizer_needed=True)
    engine = TransformersEngine(
        TransformersEngineConfig(), ServedModel(model_path=model_path, dtype="float32"), stream_interval=2
    )
    samples = submit(bench)
    async with bench.store.serving_content():
        weights = write_perturbed(model_path, bench.store.directory / "0.safetensors", seed=0)
        await bench.store.publish_file(weights, policy_version=0)
        async with bench.running(engine):
            await until(lambda: bench.broker.num_finished == len(samples), timeout_s=400)
    await assert_said_by_their_tokens(samples, model_path)
