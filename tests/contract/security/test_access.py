"""Every method times every role: who is let through, and who is refused before the servicer hears of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

from penstock.errors import BadTokenError, ForbiddenError, from_rpc_error
from penstock.network import rpc
from penstock.network.rpc import Service
from penstock.security import Security
from penstock.security.access import current_caller
from penstock.security.bearer_tokens import caller_of_token
from penstock.security.roles import Role, allowed_roles, role_name
from penstock.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    critic_pb2,
    critic_pb2_grpc,
    generator_pb2,
    generator_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    sandbox_pb2,
    sandbox_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    sessions_pb2,
    sessions_pb2_grpc,
    shards_pb2,
    shards_pb2_grpc,
    speed_pb2,
    speed_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    weights_pb2,
    weights_pb2_grpc,
)
from tests.helpers.certificates import issue, make_authority
from tests.helpers.fuzzing.grpc_requests import BROKEN_WRITE, MAX_BROKEN_WRITES
from tests.helpers.serving import serving

MODULES = (
    (broker_pb2, broker_pb2_grpc),
    (critic_pb2, critic_pb2_grpc),
    (generator_pb2, generator_pb2_grpc),
    (reward_pb2, reward_pb2_grpc),
    (sandbox_pb2, sandbox_pb2_grpc),
    (scheduler_pb2, scheduler_pb2_grpc),
    (sessions_pb2, sessions_pb2_grpc),
    (shards_pb2, shards_pb2_grpc),
    (speed_pb2, speed_pb2_grpc),
    (trainer_pb2, trainer_pb2_grpc),
    (weights_pb2, weights_pb2_grpc),
)
METHODS = [
    (service, method, grpc_module)
    for module, grpc_module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
ROLES = [role for role in Role.values() if role]
TOKENS = {role: f"{role_name(role)}:{role_name(role)}-0123456789abcdef" for role in ROLES}
OF_RUN = "trainer+generator+reward+environment@math:0123456789abcdef"
OF_RUN_ROLES = {grant.role for grant in caller_of_token(OF_RUN).grants}
SECURED = Security(token="the-operators", accepted_tokens=(*TOKENS.values(), OF_RUN), allows_plain=True)

_READS = {"GetRun", "WatchPolicy"}
_PLANS = {"GetPlan", "WatchPlan"}
_SCORES = {"Score", "GetRewardModel"}
_TRAINS = {"OpenRun", "CloseRun", "SubmitPrompts", "StreamMicrobatches", "AckStep", "DropGroups"}
_TEACHES = {"OpenCritic", "EvaluatePack", "AccumulateGradient", "StepCritic"}
_FETCHES = {"GetManifest", "WatchManifests", "FindSources", "JoinBroadcast", "ReportHolding"}
EXPECTED = {
    "trainer": {*_TRAINS, *_READS, *_PLANS, *_TEACHES, "ListRuns", "AuditRun", "GetGenerator", "ListNodes"},
    "generator": {
        *(*_READS, *_PLANS, *_SCORES, *_FETCHES),
        *("StreamLeases", "StreamTokens", "GetShardMap", "GetGenerator", "SetRelayPatience"),
        *("RegisterNode", "ReportNode", "ListNodes", "GetSpeed"),
        *("PutSession", "TakeSessions", "CheckSessions", "EndSessions"),
    },
    "reward": {*_READS, *_SCORES, "StreamScoring", "RunProgram", "ScoreAnswer", "GetSandbox"},
    "environment": {*_READS, *_SCORES, "PutTrajectories"},
    "observer": {
        *(*_READS, *_PLANS, "ListRuns", "AuditRun", "GetGenerator", "WatchRun"),
        *("GetTrainer", "ListNodes", "GetLengthModel", "GetRewardModel", "GetSandbox", "GetSpeed"),
    },
    "broker": {
        *(*_PLANS, "ForecastLengths", "ReportLengths", "GetLengthModel"),
        *("AcceptChunks", "SealLeases", "ReportTails"),
    },
}
"""What each role may call, besides the operator, which may call all: written down a second time, on purpose."""


class _Recorder:
    """A servicer that answers every call, and remembers which were let through."""

    def __init__(self, service: Any) -> None:
        self.heard: list[tuple[str, str]] = []
        for method in service.methods:
            setattr(self, method.name, self._method(method))

    def _method(self, method: Any) -> Any:
        answer = GetMessageClass(method.output_type)()

        async def unary(_request: Any, _context: Any) -> Any:
            self.heard.append((method.name, str(current_caller())))
            return answer

        async def stream(request: Any, _context: Any) -> Any:
            self.heard.append((method.name, str(current_caller())))
            if method.client_streaming:
                async for _ in request:
                    break
            yield answer

        return stream if method.server_streaming else unary


def _recorded(service: Any, grpc_module: Any) -> tuple[_Recorder, Service]:
    recorder = _Recorder(service)
    return recorder, Service(
        name=service.full_name, add=getattr(grpc_module, f"add_{service.name}Servicer_to_server"), servicer=recorder
    )


async def _call(channel: grpc.aio.Channel, service: Any, method: Any, request: Any = None) -> None:
    for _ in range(MAX_BROKEN_WRITES):
        try:
            return await _call_once(channel, service, method, request or GetMessageClass(method.input_type)())
        except grpc.aio.AioRpcError as error:
            # A stream that was refused while it was written to says no more than that.
            if error.details() != BROKEN_WRITE or not method.client_streaming:
                raise from_rpc_error(error, peer="server") from error
    raise AssertionError(f"{method.name}: {MAX_BROKEN_WRITES} streams ended while they were written to")


async def _call_once(channel: grpc.aio.Channel, service: Any, method: Any, request: Any) -> None:
    path = f"/{service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    stub = getattr(channel, kind)(
        path,
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    answers = stub(iter([request]) if method.client_streaming else request, timeout=10)
    if method.server_streaming:
        async for _ in answers:
            pass
    else:
        await answers


def test_the_protos_say_what_is_written_here():
    stated = {name: set() for name in EXPECTED}
    for _, method, _ in METHODS:
        for role in allowed_roles(method):
            stated[role_name(role)].add(method.name)
    assert stated == EXPECTED


@pytest.mark.parametrize("service_name", sorted({service.full_name for service, _, _ in METHODS}))
async def test_every_method_times_every_role(service_name):
    service, grpc_module = next((each, module) for each, _, module in METHODS if each.full_name == service_name)
    recorder, served = _recorded(service, grpc_module)
    async with serving(served, security=SECURED) as (_, target):
        for role, method in itertools.product(ROLES, service.methods):
            may = role == Role.ACCESS_ROLE_OPERATOR or method.name in EXPECTED[role_name(role)]
            recorder.heard.clear()
            async with rpc.open_channel(target, Security(token=TOKENS[role], allows_plain=True)) as channel:
                if may:
                    await _call(channel, service, method)
                else:
                    with pytest.raises(ForbiddenError, match=f"{method.name} is not open to {role_name(role)}"):
                        await _call(channel, service, method)
            assert recorder.heard == ([(method.name, role_name(role))] if may else []), method.name
        for token in (None, "wrong", "operator:0123456789abcdef"):
            async with rpc.open_channel(target, Security(token=token, allows_plain=True)) as channel:
                for method in service.methods:
                    with pytest.raises(BadTokenError):
                        await _call(channel, service, method)
        assert len(recorder.heard) <= 1


async def test_a_certificate_opens_what_its_roles_do_whatever_token_comes_with_it(tmp_path):
    service, grpc_module = next((each, module) for each, _, module in METHODS if each.name == "BrokerService")
    methods = service.methods_by_name
    recorder, served = _recorded(service, grpc_module)
    authority = make_authority(tmp_path / "ca")
    server = issue(authority, roles=["broker"], name="broker-1")
    secured = replace(server, token=SECURED.token, accepted_tokens=SECURED.accepted_tokens)
    async with serving(served, security=secured) as (_, target):
        for role in ROLES:
            name = role_name(role)
            security = issue(authority, roles=[name], name=name)
            for shown in (security, replace(security, token=SECURED.token)):
                async with rpc.open_channel(target, shown) as channel:
                    if name in ("operator", "trainer"):
                        await _call(channel, service, methods["AckStep"])
                    else:
                        with pytest.raises(ForbiddenError, match=f"AckStep is not open to {name}, {name}; it is to"):
                            await _call(channel, service, methods["AckStep"])
            async with rpc.open_channel(target, replace(security, token="wrong")) as channel:
                with pytest.raises(BadTokenError):
                    await _call(channel, service, methods["GetRun"])
        both = issue(authority, roles=["generator", "environment"], run="math", name="gpu-1")
        async with rpc.open_channel(target, both) as channel:
            hello = broker_pb2.StreamLeasesRequest(
                hello=broker_pb2.GeneratorHello(run_id="math", generator_id="gpu-1-5")
            )
            await _call(channel, service, methods["StreamLeases"], hello)
            hello.hello.generator_id = "gpu-2"
            with pytest.raises(ForbiddenError, match="generator_id: 'gpu-2' is not the certificate's"):
                await _call(channel, service, methods["StreamLeases"], hello)
            with pytest.raises(ForbiddenError, match="run_id: 'code'"):
                await _call(channel, service, methods["GetRun"], broker_pb2.GetRunRequest(run_id="code"))
    assert "gpu-1, generator of run math" in {caller for _, caller in recorder.heard}


async def test_a_caller_of_one_run_is_refused_in_another_in_every_method_that_names_a_run():
    named = 0
    for service, method, grpc_module in METHODS:
        if not allowed_roles(method) & OF_RUN_ROLES:
            continue
        kind = GetMessageClass(method.input_type)
        _, served = _recorded(service, grpc_module)
        async with (
            serving(served, security=SECURED) as (_, target),
            rpc.open_channel(target, Security(token=OF_RUN, allows_plain=True)) as channel,
        ):
            for run_id, is_own in (("math", True), ("code", False)):
                request = kind()
                if "run_id" in kind.DESCRIPTOR.fields_by_name:
                    request.run_id = run_id
                elif "hello" in kind.DESCRIPTOR.fields_by_name:
                    request.hello.run_id = run_id
                else:
                    continue
                named += 1
                if is_own:
                    await _call(channel, service, method, request)
                else:
                    with pytest.raises(ForbiddenError, match=r"run_id: 'code' is not open to .* of run math"):
                        await _call(channel, service, method, request)
    assert named >= 40
