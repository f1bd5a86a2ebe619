"""Traces over real connections: a call belongs to its caller's span, and a collector gets what is recorded."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import grpc
import structlog

from penstock import tracing
from penstock.clock import SystemClock
from penstock.environments import Action, Environment, Message, Outcome, Task
from penstock.environments.serving import EnvironmentServicer, environment_service
from penstock.network.connection import Connection
from penstock.process.log_setup import configure_logging
from penstock.process.tasks import end
from penstock.v1 import environment_pb2, environment_pb2_grpc
from services.generator.environments.client import EnvironmentClient
from services.generator.environments.config import EnvironmentLimits
from services.trainer.compute.compute_thread import ComputeThread
from tests.helpers.serving import channel_to
from tests.helpers.traces import spans_in, tracing_to


async def test_a_line_of_the_compute_thread_says_whose_it_is_and_of_which_trace(capfd):
    configure_logging("critic", run_id="r", log_format="json")
    step, thread = tracing.step_context("r", 1, 0), ComputeThread(clock=SystemClock(), on_span=lambda start, end: None)
    with tracing.within(step):
        await thread.run(lambda: structlog.get_logger().info("computed"))
    thread.close()
    [line] = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert (line["service"], line["run_id"], line["trace_id"]) == ("critic", "r", f"{step.trace_id:032x}")


class Echo(Environment):
    """Logs each turn; some go wrong."""

    def reset(self, task: Task) -> None:
        return None

    def step(self, action: Action) -> Outcome:
        structlog.get_logger().info("a turn was taken")
        if action.text == "break":
            raise ValueError("it broke")
        return Outcome(messages=[Message(role="user", content=action.text)], reward=1.0)


async def test_what_an_environment_does_belongs_to_the_sample_that_asks_in_spans_and_logs(tmp_path, capfd):
    configure_logging("environment", run_id="r", log_format="json")
    sample = tracing.sample_context(tracing.group_context("r", "g"), 0, 0)
    other = replace(tracing.group_context("r", "not sampled"), is_sampled=False)
    with tracing_to(tmp_path, ratio=0.0):
        servicer = EnvironmentServicer(Echo)
        service = environment_service(servicer)
        async with channel_to(service) as channel:
            stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
            # As a generator calls it.
            client = EnvironmentClient(Connection(channel), EnvironmentLimits())
            await client.reset(environment_pb2.ResetRequest(session_id="s"))
            with tracing.within(sample):
                await client.step(environment_pb2.StepRequest(session_id="s", turn=0, text="hello"))
            with tracing.within(other):
                await client.step(environment_pb2.StepRequest(session_id="s", turn=1, text="hello"))
            bad = grpc.aio.Metadata(("traceparent", "00-of nothing"))
            await stub.Step(environment_pb2.StepRequest(session_id="s", turn=2, text="x"), metadata=bad)
            with tracing.within(other):
                await client.step(environment_pb2.StepRequest(session_id="s", turn=3, text="break"))
        recording = asyncio.create_task(servicer.record_work())
        await asyncio.sleep(0)
        await end(recording)
    spans = spans_in(tmp_path)
    first, *others = [each.span for each in spans if each.name == "rl.environment.step"]
    assert (first["traceId"], first["parentSpanId"]) == (f"{sample.trace_id:032x}", f"{sample.span_id:016x}")
    # What is not sampled leaves no span, unless it fails; all of it counts as work of the server.
    [failed] = others
    assert (failed["traceId"], failed["status"]["code"]) == (f"{other.trace_id:032x}", 2)
    assert failed["status"]["message"].endswith("ValueError: it broke")
    assert {each.name for each in spans} == {"rl.environment.step", "rl.environment.work"}
    lines = [line for line in capfd.readouterr().err.splitlines() if "a turn was taken" in line]
    found = [json.loads(line).get("trace_id") for line in lines]
    assert found == [first["traceId"], failed["traceId"], None, failed["traceId"]]
    assert all('"run_id": "r"' in line for line in lines)
