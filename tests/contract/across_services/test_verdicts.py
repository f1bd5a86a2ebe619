"""From a reward model's verdict to advantages: what was not judged is in no group's baseline."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.network.rpc import Service, service_of
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from services.broker.storage.memory_store import MemoryStore
from services.reward.config import RewardConfig
from services.reward.server import serve
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.batches.group_decoder import training_samples
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import StepSettings
from tests.helpers.brokers import broker as real
from tests.helpers.models.tokenizer_kinds import letters
from tests.helpers.serving import serving
from tests.unit.trainer.builders import RecordingBackend

STOP = types_pb2.FINISH_REASON_STOP
OK = types_pb2.SCORE_STATUS_OK
UNJUDGED = {status: name for name, status in types_pb2.ScoreStatus.items() if status > OK}
VERDICTS = [
    types_pb2.Score(status=OK, value=1.0, components={"correct": 1.0, "style": 0.5}),
    types_pb2.Score(status=OK, value=0.0, components={"correct": 0.0}),
    *(types_pb2.Score(status=status) for status in UNJUDGED),
]


class Judge(reward_pb2_grpc.RewardServiceServicer):
    """A server of the user's own that gives every verdict there is, one for each sample of a group."""

    def service(self) -> Service:
        return service_of(self)

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        return reward_pb2.ScoreResponse(scores=[VERDICTS[item.key.sample_index] for item in request.items])


@pytest.mark.parametrize(
    ("policy", "advantages", "components"),
    [
        ("wrong", [2 / 3, -1 / 3, -1 / 3], {"correct": 0.5, "style": 0.5, "exceeded_limit": 1.0}),
        ("drop", [0.5, -0.5], {"correct": 0.5, "style": 0.5}),
    ],
)
async def test_verdicts_without_a_value_leave_the_groups_baseline_and_are_counted_by_name(
    tmp_path: Path, policy: str, advantages: list[float], components: dict[str, float]
) -> None:
    letters(tmp_path)
    async with real.serving(MemoryStore()) as broker, serving(Judge().service()) as (_, target):
        await broker.open(groups_per_step=1, group_size=len(VERDICTS))
        await broker.submit(real.prompt("a", group_size=len(VERDICTS)))
        generator = real.Generator.connect(broker.channel, "gen-1")
        generator.beat(credits=len(VERDICTS))
        for lease in await generator.leases(len(VERDICTS)):
            assert await generator.put(real.chunk(lease, [2, 3], finish=STOP)) == []
        config = RewardConfig(
            listen="127.0.0.1:0",
            run_id=real.RUN,
            broker=f"127.0.0.1:{broker.server.port}",
            tokenizer_path=tmp_path,
            reward={"model": f"grpc://{target}", "candidate_limit": policy, "max_retries": 0, "max_error_share": 1},
        )
        worker = asyncio.create_task(serve(config))
        try:
            [group] = await real.Trainer.connect(broker.channel).groups(1)
            dropped = dict((await broker.audit()).dropped)
        finally:
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)
    reasons = [name.removeprefix("SCORE_STATUS_").lower() for name in UNJUDGED.values()]
    assert dropped == {f"reward_{name}": 1 for name in reasons if policy == "drop" or name != "candidate_limit"}
    backend = RecordingBackend()
    step = TrainingStep(
        backend,
        StepSettings(
            policy_version=0,
            max_staleness=0,
            max_pack_tokens=64,
            algorithm=DR_GRPO,
            normalization=DR_GRPO.normalization,
        ),
    )
    assert step.add_groups([training_samples(group)]) == ()
    report = step.finish()
    assert report.component_means == pytest.approx(components)
    found = [
        float(pack.advantages[pack.target_segments == segment][0])
        for pack in backend.packs
        for segment in range(len(pack.segment_lengths))
    ]
    assert sorted(found, reverse=True) == pytest.approx(advantages)
