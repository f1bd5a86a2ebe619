"""The reward worker against a scripted broker, and RewardService as anyone calls it."""

import asyncio
import math
import threading
from contextlib import asynccontextmanager

import pytest

from penstock.clients.scoring import ScoringSession
from penstock.clock import ManualClock
from penstock.errors import BadTokenError, InternalError, InvalidFieldError
from penstock.network.connection import Connection
from penstock.network.rpc import Server, call, open_channel, service_of, wait_until_serving
from penstock.rewards import ModelAwayError, RewardResult, reward
from penstock.rewards.check import SERVICE_NAME
from penstock.rewards.local import LocalModel
from penstock.rewards.serving import reward_service
from penstock.security import Security
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from penstock.v1.broker_pb2 import ScoreResult
from penstock.wire.source_tag import SourceTag, tagged
from services.broker.storage.memory_store import MemoryStore
from services.reward.config import RewardConfig, RewardModelConfig
from services.reward.models.build import build_model
from services.reward.models.remote import RemoteModel
from services.reward.pool import ScoringPool
from services.reward.server import serve
from tests.helpers.brokers.broker import Generator, Worker
from tests.helpers.brokers.broker import prompt as broker_prompt
from tests.helpers.brokers.broker import serving as broker_serving
from tests.helpers.brokers.scripted_scoring import ScriptedBroker, scoring_item
from tests.helpers.ports import free_address, free_port
from tests.helpers.serving import serving
from tests.helpers.waiting import until

OK, ABSTAINED, TIMEOUT, FAILED, INVALID = (
    types_pb2.SCORE_STATUS_OK,
    types_pb2.SCORE_STATUS_ABSTAINED,
    types_pb2.SCORE_STATUS_TIMEOUT,
    types_pb2.SCORE_STATUS_FAILED,
    types_pb2.SCORE_STATUS_INVALID,
)


def items(num, **fields):
    return [scoring_item(number, **fields) for number in range(num)]


def session_to(target, *, max_leases=8, security=None):
    options = {} if security is None else {"security": security}
    return ScoringSession(Connection(target, **options), run_id="r", worker_id="w", max_leases=max_leases)


@asynccontextmanager
async def running(*coroutines):
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def worker(target, model_name="exact_match", *, max_leases=8, **config):
    session = session_to(target, max_leases=max_leases)
    model = build_model(model_name)
    pool = ScoringPool(source=session, model=model, config=RewardModelConfig(**config))
    async with running(session.run(), pool.run()):
        yield session
    await model.close()


class Scripted(reward_pb2_grpc.RewardServiceServicer):
    """Answers what `answer(items)` says."""

    def __init__(self, answer, description=None):
        self.answer = answer
        self.description = description
        self.requests = []

    def service(self):
        return service_of(self)

    async def Score(self, request, context):
        self.requests.append(request)
        return reward_pb2.ScoreResponse(scores=self.answer(list(request.items)))

    async def GetRewardModel(self, request, context):
        return self.description or await super().GetRewardModel(request, context)


def ones(scored):
    return [types_pb2.Score(status=OK, value=1.0) for _ in scored]


# --- the worker -------------------------------------------------------------------------------------------------------


async def test_every_sample_is_scored_once_and_credits_bound_what_is_held():
    script = items(100)
    for number in range(0, 100, 2):
        script[number].completion_text = "#### 5"
    broker = ScriptedBroker(script)
    async with serving(broker.service()) as (_, target), worker(target, max_leases=8) as session:
        await until(lambda: len(broker.results) == 100 and session.num_held == 0)

    assert broker.num_results == 100
    assert broker.most_out <= 8
    assert [broker.results[number].value for number in range(4)] == [0.0, 1.0, 0.0, 1.0]
    assert {score.model for score in broker.results.values()} == {"exact_match"}


async def test_a_source_whose_reward_is_away_holds_up_no_other_although_its_samples_fill_the_credits():
    """The first 30 samples are of it, and the worker holds 4 where all rewards answer."""
    script = [*items(30), *items(50)[30:]]
    for item in script:
        item.metadata_json = tagged("", SourceTag(source="hard" if item.key.sample_index < 30 else "easy"))
    small = {"max_batch_size": 1, "max_concurrent_batches": 1}
    port = free_port()
    config = RewardConfig(
        listen=free_address(),
        run_id="r",
        reward=RewardModelConfig(trusts_generator_text=True, **small),
        sources={"hard": RewardModelConfig(model=f"grpc://127.0.0.1:{port}", trusts_generator_text=True, **small)},
    )
    broker = ScriptedBroker(script, lease_s=1.5)
    async with (
        serving(broker.service()) as (_, target),
        running(serve(config.model_copy(update={"broker": target}))),
    ):
        await until(lambda: len(broker.results) == 20)
        assert min(broker.results) == 30
        async with serving_on(port, reward_service(LocalModel(reward(lambda completion: 2.0)))):
            await until(lambda: len(broker.results) == 50)
    assert {broker.results[number].value for number in range(30)} == {2.0}
    assert broker.most_out <= 30 + 4


async def test_the_process_starts_before_broker_and_run_and_scores_once_they_are_there():
    port, own_port = free_port(), free_port()
    config = RewardConfig(
        listen=f"127.0.0.1:{own_port}",
        run_id="r",
        broker=f"127.0.0.1:{port}",
        worker_id="w-7",
        reward=RewardModelConfig(trusts_generator_text=True),
    )
    broker = ScriptedBroker(items(5), is_known=False)
    async with running(serve(config)) as (process,):
        assert await wait_until_serving(f"127.0.0.1:{own_port}", service=SERVICE_NAME, timeout_s=10)
        async with serving_on(port, broker.service()):
            broker.is_known = True
            await until(lambda: len(broker.results) == 5)
        assert not process.done()

    assert broker.hellos[0].run_id == "r"
    assert broker.hellos[0].worker_id == "w-7"


@asynccontextmanager
async def serving_on(port, *services):
    server = Server(listen=f"127.0.0.1:{port}", services=services)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(grace_s=0.1)


async def test_an_unknown_run_is_waited_for():
    broker = ScriptedBroker(items(3), is_known=False)
    async with serving(broker.service()) as (_, target), worker(target):
        await until(lambda: broker.num_refused >= 2)
        broker.is_known = True
        await until(lambda: len(broker.results) == 3)


async def test_a_result_the_broker_never_confirmed_is_sent_again():
    broker = ScriptedBroker(items(3))
    broker.swallow_results = 2
    async with serving(broker.service()) as (_, target), worker(target) as session:
        await until(lambda: len(broker.results) == 3 and session.num_held == 0)

    assert len(broker.hellos) == 3
    assert broker.renewals[1] == {"lease-0", "lease-1", "lease-2"}
    assert session.num_leased == 3


async def test_samples_wait_with_renewed_leases_while_the_model_is_away_and_are_scored_when_it_is_back():
    port = free_port()
    broker = ScriptedBroker(items(4), lease_s=1.5)
    async with serving(broker.service()) as (_, target), worker(target, f"grpc://127.0.0.1:{port}", max_retries=0):
        await until(lambda: broker.renewals.count({f"lease-{number}" for number in range(4)}) >= 2)
        assert broker.num_results == 0
        async with serving_on(port, Scripted(ones).service()):
            await until(lambda: len(broker.results) == 4)

    assert {score.status for score in broker.results.values()} == {OK}


async def test_a_lost_lease_is_forgotten_and_frees_its_credit():
    broker = ScriptedBroker(items(6))
    broker.lose = {"lease-0", "lease-1"}
    async with serving(broker.service()) as (_, target), worker(target, max_leases=2) as session:
        await until(lambda: len(broker.results) == 4 and session.num_held == 0)

    assert sorted(broker.results) == [2, 3, 4, 5]
    assert session.num_lost == 2


async def test_a_closed_run_is_waited_for_and_scored_when_it_is_opened_again():
    broker = ScriptedBroker(items(2))
    async with serving(broker.service()) as (_, target), worker(target) as session:
        await until(lambda: len(broker.results) == 2)
        broker.is_closed = True
        await until(lambda: len(broker.hellos) > 1)
        assert session.num_held == 0
        broker.items.extend(items(4)[2:])
        broker.is_closed = False
        await until(lambda: len(broker.results) == 4)


async def test_draining_answers_what_is_held_and_asks_for_no_more():
    broker = ScriptedBroker(items(50))
    release = threading.Event()

    @reward(max_threads=4)
    def slow(completion):
        release.wait(10)
        return 1.0

    async with serving(broker.service()) as (_, target):
        session = session_to(target, max_leases=4)
        pool = ScoringPool(source=session, model=LocalModel(slow), config=RewardModelConfig())
        async with running(session.run(), pool.run()):
            await until(lambda: session.num_held == 4)
            draining = asyncio.create_task(session.drain(timeout_s=10))
            release.set()
            assert await draining == 0

    assert len(broker.results) == 4
    assert len(broker.items) == 46


async def test_a_worker_that_stops_hands_back_what_it_does_not_score():
    # By this clock no lease ever ends.
    clock = ManualClock()
    async with broker_serving(MemoryStore(clock), clock=clock) as broker:
        await broker.open(run_id="r")
        await broker.submit(broker_prompt("a"), broker_prompt("b"), run_id="r")
        generator = Generator.connect(broker.channel, run_id="r")
        generator.beat(credits=4)
        await generator.finish(await generator.leases(4))
        session = session_to(f"127.0.0.1:{broker.server.port}", max_leases=3)
        async with running(session.run()):
            await until(lambda: session.num_held == 3)
            [scored] = await session.take(max_items=1)
            [slow] = await session.take(max_items=1)
            draining = asyncio.create_task(session.drain(timeout_s=3))
            other = Worker.connect(broker.channel, "other", run_id="r")
            # What nobody has begun to score goes to others at once, beside the one that nobody had.
            first = {lease.lease_id for lease in await other.leases(2)}
            assert len(first) == 2
            score = types_pb2.Score(status=OK, value=1.0)
            session.answer([ScoreResult(lease_id=scored.lease_id, key=scored.item.key, score=score)])
            # The rest does before the worker is gone.
            [last] = await other.leases(1)
            assert last.item.key == slow.item.key
            assert await draining == 0
            assert not session.is_held(slow.lease_id)
            assert session.num_lost == 0
        late = await other.report(ScoreResult(lease_id=slow.lease_id, key=slow.item.key, score=score))
        assert list(late.lost_lease_ids) == [slow.lease_id]
        assert (await broker.audit(run_id="r")).balanced


async def test_draining_gives_up_at_its_deadline():
    broker = ScriptedBroker(items(2))
    async with serving(broker.service()) as (_, target):
        session = session_to(target)
        async with running(session.run()):
            await until(lambda: session.num_held == 2)
            assert await session.drain(timeout_s=0.05) == 2


async def test_a_wrong_token_ends_the_session_instead_of_trying_for_ever():
    broker = ScriptedBroker(items(1))
    async with serving(broker.service(), security=Security(token="right", allows_plain=True)) as (_, target):
        with pytest.raises(BadTokenError, match="PENSTOCK_TOKEN"):
            async with asyncio.timeout(10):
                await session_to(target, security=Security(token="wrong", allows_plain=True)).run()


# --- RewardService ----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stub_of(model):
    async with serving(reward_service(model)) as (_, target), open_channel(target) as channel:
        yield reward_pb2_grpc.RewardServiceStub(channel)


async def test_built_in_models_are_served_to_anyone():
    async with stub_of(build_model("numeric")) as stub:
        request = reward_pb2.ScoreRequest(items=items(2, completion="#### 4.0"))
        scores = (await call(stub.Score, request, peer="reward")).scores
        description = await call(stub.GetRewardModel, reward_pb2.GetRewardModelRequest(), peer="reward")

    assert [score.value for score in scores] == [1.0, 1.0]
    assert description.name == "numeric"


@pytest.mark.parametrize("num_items", [0, 65])
async def test_batches_of_a_wrong_size_are_refused(num_items):
    async with stub_of(LocalModel(reward(lambda completion: 1.0))) as stub:
        with pytest.raises(InvalidFieldError, match="must be 1 to 64"):
            await call(stub.Score, reward_pb2.ScoreRequest(items=items(num_items)), peer="reward")


async def test_a_slow_sample_times_out_inside_the_callers_deadline_and_its_neighbour_is_scored():
    release = threading.Event()

    def judge(completion):
        return 1.0 if completion == "quick" else release.wait(20)

    async with stub_of(LocalModel(reward(judge))) as stub:
        request = reward_pb2.ScoreRequest(
            items=[scoring_item(0, completion="slow"), scoring_item(1, completion="quick")]
        )
        scores = (await call(stub.Score, request, peer="reward", timeout_s=2)).scores
        release.set()

    assert [score.status for score in scores] == [TIMEOUT, OK]


# --- models behind gRPC -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def remote(scripted):
    async with serving(scripted.service()) as (_, target):
        model = RemoteModel(f"grpc://{target}")
        try:
            yield model
        finally:
            await model.close()


async def test_malformed_scores_fail_their_samples_only():
    def answer(scored):
        return [
            types_pb2.Score(status=OK, value=1.0),
            types_pb2.Score(status=OK, value=math.nan),
            types_pb2.Score(status=OK),
            types_pb2.Score(value=1.0),
            types_pb2.Score(status=FAILED, value=0.0),
            types_pb2.Score(status=ABSTAINED, message="m" * 5000),
            types_pb2.Score(status=OK, value=1.0, components={"part": math.inf}),
        ]

    async with remote(Scripted(answer)) as model:
        scores = await model.score(items(7), timeout_s=5)

    assert [score.status for score in scores] == [OK, FAILED, FAILED, FAILED, FAILED, ABSTAINED, FAILED]
    assert [score.HasField("value") for score in scores] == [True] + [False] * 6
    assert max(len(score.message) for score in scores) <= 1024


async def test_a_wrong_count_is_an_error_of_the_server():
    async with remote(Scripted(lambda scored: ones(scored)[1:])) as model:
        with pytest.raises(InternalError, match="1 scores for 2 items"):
            await model.score(items(2), timeout_s=5)


async def test_batches_follow_what_the_model_asks_for():
    description = reward_pb2.GetRewardModelResponse(name="mine", max_batch_size=3)
    scripted = Scripted(ones, description)
    big = items(2, completion="x" * 700_000)
    async with remote(scripted) as model:
        scores = await model.score([*items(7), *big], timeout_s=5)
        assert model.name == "mine"

    assert len(scores) == 9
    assert [len(request.items) for request in scripted.requests] == [3, 3, 2, 1]
    assert not any(item.token_ids for request in scripted.requests for item in request.items)


async def test_token_ids_are_sent_to_models_that_want_them():
    scripted = Scripted(ones, reward_pb2.GetRewardModelResponse(wants_token_ids=True))
    async with remote(scripted) as model:
        await model.score(items(1), timeout_s=5)

    assert scripted.requests[0].items[0].token_ids


async def test_a_model_that_does_not_describe_itself_has_the_defaults():
    scripted = Scripted(ones)
    async with remote(scripted) as model:
        await model.score(items(65), timeout_s=5)

    assert [len(request.items) for request in scripted.requests] == [64, 1]
    assert model.name.startswith("grpc://127.0.0.1:")


async def test_a_server_that_is_no_reward_model_is_away_and_burns_no_sample():
    async with serving(ScriptedBroker([]).service()) as (_, target):
        model = RemoteModel(f"grpc://{target}")
        with pytest.raises(ModelAwayError):
            await model.score(items(1), timeout_s=5)
        await model.close()


async def test_a_model_without_a_server_is_away():
    model = RemoteModel(f"grpc://127.0.0.1:{free_port()}")
    with pytest.raises(ModelAwayError, match=r"reward model grpc://127\.0\.0\.1"):
        await model.score(items(1), timeout_s=5)
    await model.close()


async def test_a_model_that_fails_on_one_sample_costs_the_run_only_that_sample():
    def answer(scored):
        if any(item.key.sample_index == 3 for item in scored):
            raise ValueError("sample 3")
        return ones(scored)

    broker = ScriptedBroker(items(8))
    async with (
        serving(Scripted(answer).service()) as (_, model),
        serving(broker.service()) as (_, target),
        worker(target, f"grpc://{model}", max_retries=0),
    ):
        await until(lambda: len(broker.results) == 8)

    assert [broker.results[number].status for number in range(8)] == [OK, OK, OK, FAILED, OK, OK, OK, OK]


async def test_components_reach_the_broker():
    broker = ScriptedBroker(items(1))
    model = LocalModel(reward(lambda completion: RewardResult(0.5, {"style": 0.25})))
    async with serving(broker.service(), reward_service(model)) as (_, target), worker(target, f"grpc://{target}"):
        await until(lambda: len(broker.results) == 1)

    assert dict(broker.results[0].components) == {"style": 0.25}
    assert broker.results[0].value == 0.5


@pytest.mark.parametrize("is_served", [False, True])
async def test_samples_wait_while_a_users_own_reward_fails_for_all_and_none_is_lost(is_served):
    """Nothing in the user's function, or server, says how: it raises while what it asks is out of order."""
    outage = [ConnectionError("api.example refused")]

    @reward
    async def judge(completion: str) -> float:
        for error in outage:
            raise error
        return float(len(completion))

    broker, model = ScriptedBroker(items(40)), LocalModel(judge)
    async with serving(broker.service(), reward_service(model)) as (_, target):
        used = RemoteModel(f"grpc://{target}") if is_served else model
        session = session_to(target, max_leases=40)
        config = RewardModelConfig(max_batch_size=20, max_retries=1)
        pool = ScoringPool(source=session, model=used, config=config)
        session.holding_reason = lambda: pool.holding_reason
        async with running(session.run(), pool.run()):
            await until(lambda: "judge raised ConnectionError: api.example refused" in pool.holding_reason)
            assert pool.holding_reason.startswith("reward model judge cannot judge: FAILED for ")
            assert not broker.results
            outage.clear()
            await until(lambda: len(broker.results) == 40)
        await used.close()
    assert {score.value for score in broker.results.values()} == {6.0}
    assert pool.holding_reason == ""
