"""Every service but the broker's, and honest requests to damage, for tests that send nonsense."""

from __future__ import annotations

from typing import Any, NoReturn

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry

from penstock.clients.scheduler.inventory import this_machine
from penstock.clock import ManualClock
from penstock.environments import Action, Environment, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.errors import InvalidFieldError
from penstock.network.rpc import Service, service_of
from penstock.rewards.serving import reward_service
from penstock.v1 import (
    broker_pb2,
    critic_pb2,
    environment_pb2,
    generator_pb2,
    reward_pb2,
    sandbox_pb2,
    scheduler_pb2,
    sessions_pb2,
    shards_pb2,
    speed_pb2,
    trainer_pb2,
    types_pb2,
    weights_pb2,
)
from services.broker.brokers.shard_service import ShardService
from services.generator.engine.engine import UpdateMode
from services.generator.service import GeneratorServicer
from services.reward.code.cell import Verdict
from services.reward.code.config import ProgramsConfig
from services.reward.code.program_messages import limits_message
from services.reward.models.build import build_model
from services.reward.sandbox.service import SandboxServicer
from services.scheduler.config import LengthsConfig
from services.scheduler.server import make_forecaster
from services.scheduler.service import SchedulerServicer
from services.trainer.compute.speed import Speed, speed_service
from services.trainer.critic.service import CriticService
from services.trainer.publishing.version_store import WeightStore, WeightStoreService
from services.trainer.service import TrainerService
from tests.helpers.brokers.agent_sessions import agent_turn
from tests.helpers.brokers.broker import RUN, chunk, duration, limits, prompt
from tests.helpers.brokers.members import NotedShards
from tests.helpers.brokers.trajectories import groups
from tests.helpers.rewards.sandbox_service import ScriptedCells, ScriptedScorers
from tests.helpers.trainers.critics import critic_packs, open_critic, opening

SERVICES = [
    module.DESCRIPTOR.services_by_name[name]
    for module, name in (
        (reward_pb2, "RewardService"),
        (scheduler_pb2, "SchedulerService"),
        (trainer_pb2, "TrainerService"),
        (critic_pb2, "CriticService"),
        (speed_pb2, "SpeedService"),
        (weights_pb2, "WeightStoreService"),
        (generator_pb2, "GeneratorService"),
        (shards_pb2, "ShardService"),
        (environment_pb2, "EnvironmentService"),
        (sandbox_pb2, "SandboxService"),
    )
]


BROKER_SERVICES = [
    broker_pb2.DESCRIPTOR.services_by_name["BrokerService"],
    sessions_pb2.DESCRIPTOR.services_by_name["SessionService"],
]
"""What a broker serves by itself."""


def broker_requests() -> dict[str, list[Message]]:
    """An honest request of every call of the broker, or a stream's first ones."""
    key = types_pb2.SampleKey(group_id="a", sample_index=0)
    score = broker_pb2.ScoreResult(
        lease_id="l", key=key, score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=1.0)
    )
    hello = broker_pb2.GeneratorHello(run_id=RUN, generator_id="g", max_context_tokens=128)
    return {
        "OpenRun": [broker_pb2.OpenRunRequest(run_id=RUN, limits=limits())],
        "CloseRun": [broker_pb2.CloseRunRequest(run_id="other")],
        "SubmitPrompts": [broker_pb2.SubmitPromptsRequest(run_id=RUN, prompts=[prompt("b"), prompt("c")])],
        "StreamLeases": [
            broker_pb2.StreamLeasesRequest(hello=hello),
            broker_pb2.StreamLeasesRequest(beat=broker_pb2.GeneratorBeat(credit_total=4)),
        ],
        "StreamTokens": [
            broker_pb2.StreamTokensRequest(
                run_id=RUN, generator_id="g", sequence=1, chunks=[chunk(broker_pb2.Lease(lease_id="l", key=key), [1])]
            )
        ],
        "StreamScoring": [
            broker_pb2.StreamScoringRequest(hello=broker_pb2.RewardHello(run_id=RUN, worker_id="w"), credit_total=2),
            broker_pb2.StreamScoringRequest(results=[score]),
        ],
        "PutTrajectories": [
            broker_pb2.PutTrajectoriesRequest(
                run_id=RUN,
                producer_id="p",
                put_id="1",
                groups=types_pb2.TrajectoryGroups(groups=groups("x")).SerializeToString(),
            )
        ],
        "StreamMicrobatches": [
            broker_pb2.StreamMicrobatchesRequest(
                hello=broker_pb2.TrainerHello(run_id=RUN, consumer_id="c", purpose=types_pb2.PURPOSE_TRAIN),
                credit_total=1,
            )
        ],
        "AckStep": [broker_pb2.AckStepRequest(run_id=RUN, consumer_id="c", group_ids=["a"], policy_version=1)],
        "DropGroups": [broker_pb2.DropGroupsRequest(run_id=RUN, group_ids=["z"], reason="r")],
        "GetShardMap": [broker_pb2.GetShardMapRequest(run_id=RUN)],
        "GetRun": [broker_pb2.GetRunRequest(run_id=RUN)],
        "DeleteRun": [broker_pb2.DeleteRunRequest(run_id="other")],
        "ListRuns": [broker_pb2.ListRunsRequest()],
        "AuditRun": [broker_pb2.AuditRunRequest(run_id=RUN)],
        "WatchPolicy": [broker_pb2.WatchPolicyRequest(run_id=RUN)],
        "ExportTrajectories": [broker_pb2.ExportTrajectoriesRequest(run_id=RUN)],
        "PutSession": [
            sessions_pb2.PutSessionRequest(
                run_id=RUN,
                generator_id="g",
                session=sessions_pb2.AgentSession(session_id="s", task="t", group="a", undelivered_turns=[0]),
                turns=[agent_turn(1, 2)],
                keep_for=duration(60),
            )
        ],
        "TakeSessions": [sessions_pb2.TakeSessionsRequest(run_id=RUN, generator_id="g", session_id="s", task="t")],
        "CheckSessions": [sessions_pb2.CheckSessionsRequest(run_id=RUN, generator_id="g", session_ids=["s"])],
        "EndSessions": [
            sessions_pb2.EndSessionsRequest(run_id=RUN, generator_id="g", session_ids=["s"], outcome="put")
        ],
    }


class StillGenerator:
    """A generator that does nothing: what is tested is what stands before it."""

    update_mode = UpdateMode.KEEP
    run_id = RUN

    def set_relay_patience(self, patience_s: float) -> None:
        """Any will do."""

    def view(self) -> generator_pb2.GetGeneratorResponse:
        return generator_pb2.GetGeneratorResponse()

    def drain(self, grace_s: float | None) -> bool:
        return grace_s is None or grace_s >= 0

    async def pause(self, is_paused: bool) -> None:
        pass

    async def pull(self, policy_version: int | None, mode: int) -> NoReturn:
        raise InvalidFieldError("no such version", field="policy_version")


class Done(Environment):
    """Every session is one turn."""

    def reset(self, task: Task) -> None:
        """Any task will do."""

    def step(self, action: Action) -> Outcome:
        """See `Environment.step`."""
        return Outcome(reward=float(len(action.text)), is_done=True)


def _refuse(spec: Any) -> NoReturn:
    raise InvalidFieldError("no run begins in this test", field="run_id")


def make_services() -> list[Service]:
    """Every service but the broker's, with nothing behind it."""
    trainer = TrainerService(make_run=_refuse, weights_url="http://127.0.0.1:1")
    weights = WeightStoreService(WeightStore())
    lengths = make_forecaster(LengthsConfig(), clock=ManualClock(), registry=CollectorRegistry())
    shards = NotedShards()
    scheduler = SchedulerServicer(clock=ManualClock(), heartbeat_interval_s=5.0, lengths=lengths)
    return [
        reward_service(build_model("exact_match")),
        service_of(scheduler),
        service_of(trainer),
        service_of(weights),
        service_of(GeneratorServicer(StillGenerator())),
        service_of(ShardService(shards, shards)),
        service_of(CriticService("r", open_critic())),
        speed_service(Speed()),
        environment_service(EnvironmentServicer(Done, max_sessions=8, max_idle_s=0.1)),
        service_of(
            SandboxServicer(
                ScriptedCells(Verdict(num_tests=1)),
                sandbox="none",
                programs=ProgramsConfig(),
                scorers=ScriptedScorers({"value": 1.0}),
            )
        ),
    ]


def valid_requests(method: MethodDescriptor) -> list[Message]:
    """An honest request, where its damaged forms say more than any values do."""
    key = types_pb2.SampleKey(group_id="g", sample_index=0)
    known: dict[str, Message] = {
        "Score": reward_pb2.ScoreRequest(
            items=[reward_pb2.ScoreItem(key=key, completion_text="2", answer="2", metadata_json="{}")]
        ),
        "RegisterNode": scheduler_pb2.RegisterNodeRequest(node=this_machine(node_id="n")),
        "CreatePlan": scheduler_pb2.CreatePlanRequest(run_id="r", num_generators=2),
        "StartRun": trainer_pb2.StartRunRequest(run_id="r", config_json="{}"),
        "OpenCritic": opening(),
        "EvaluatePack": critic_pb2.EvaluatePackRequest(
            run_id="r", place=critic_pb2.CriticPlace(epoch=1), pack=critic_packs(1)[0]
        ),
        "AccumulateGradient": critic_pb2.AccumulateGradientRequest(
            run_id="r", place=critic_pb2.CriticPlace(epoch=1), gradient_id=1, pack=critic_packs(1)[0]
        ),
        "StepCritic": critic_pb2.StepCriticRequest(
            run_id="r", place=critic_pb2.CriticPlace(epoch=1), gradient_id=1, num_packs=1, rate_factor=1.0
        ),
        "AcceptChunks": shards_pb2.AcceptChunksRequest(
            run_id="r", token_shard=1, sender_id="g", chunks=[chunk(broker_pb2.Lease(lease_id="l", key=key), [1])]
        ),
        "SealLeases": shards_pb2.SealLeasesRequest(
            run_id="r", token_shard=1, leases=[shards_pb2.EndedLease(key=key, lease_id="l")]
        ),
        "ReportTails": shards_pb2.ReportTailsRequest(
            run_id="r", token_shard=1, reports=[shards_pb2.SampleReport(key=key)]
        ),
        "Reset": environment_pb2.ResetRequest(session_id="s", answer="2", metadata_json="{}"),
        "Step": environment_pb2.StepRequest(session_id="s", text="2"),
        "ScoreAnswer": sandbox_pb2.ScoreAnswerRequest(
            row_json='{"name": "chain_sum", "seed": 0, "level": null, "config": {}, "index": 0}',
            expected="2",
            given="2",
        ),
        "RunProgram": sandbox_pb2.RunProgramRequest(
            program="print(1)",
            tests_kind=sandbox_pb2.TESTS_KIND_STREAMS,
            tests_json='{"inputs": [""], "outputs": ["1"]}',
            limits=limits_message(ProgramsConfig().limits),
        ),
        "SetRelayPatience": generator_pb2.SetRelayPatienceRequest(run_id="r", patience=Duration(seconds=1)),
        "DrainGenerator": generator_pb2.DrainGeneratorRequest(grace=Duration(seconds=1)),
    }
    return [known[method.name]] if method.name in known else []
