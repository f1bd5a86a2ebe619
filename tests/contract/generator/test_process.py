"""`serve` as a process of its own: what a supervisor sees of it."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys

import pytest

from console.launch.ports import free_block
from penstock.network.rpc import call, open_channel, wait_until_serving
from penstock.v1 import generator_pb2, generator_pb2_grpc
from tests.helpers.ports import free_port

pytestmark = pytest.mark.slow

SERVE = """
import json, sys, uvloop
from services.generator.config import GeneratorConfig
from services.generator.server import serve
uvloop.run(serve(GeneratorConfig(**json.loads(sys.argv[1]))))
"""
IMPORTED = """
import sys
import services.generator.server
print(sorted({"torch", "vllm", "transformers", "tokenizers"} & set(sys.modules)))
"""


async def start(code, *arguments):
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, *arguments, stdout=pipe, stderr=pipe)


def settings(tmp_path, port, **rest):
    document = {
        "listen": f"127.0.0.1:{port}",
        "run_id": "r",
        "broker": "127.0.0.1:9",
        "weights": "127.0.0.1:9",
        "model_path": str(tmp_path),
        "cache_dir": str(tmp_path / "cache"),
        "engine": {"engine": "emulated"},
        **rest,
    }
    return json.dumps(document)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_reports_healthy_without_broker_or_trainer_and_ends_on_a_signal(tmp_path, number):
    port = free_port()
    process = await start(SERVE, settings(tmp_path, port))
    try:
        assert await wait_until_serving(f"127.0.0.1:{port}", service="penstock.v1.GeneratorService", timeout_s=45)
        process.send_signal(number)
        async with asyncio.timeout(10):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_port_in_use_ends_it_with_an_error_that_names_the_port(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        process = await start(SERVE, settings(tmp_path, port))
        async with asyncio.timeout(20):
            _, errors = await process.communicate()
    assert process.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in errors.decode()


async def test_nothing_heavy_is_imported_before_an_engine_is_chosen():
    process = await start(IMPORTED)
    async with asyncio.timeout(20):
        output, errors = await process.communicate()
    assert output.decode().strip() == "[]", errors.decode()


async def test_a_process_may_hold_several_emulated_generators_each_with_its_own_name_and_port(tmp_path):
    port = free_block(2)
    instances = [{"count": 1, "emulated": {"gpu": "H20"}}, {"emulated": {"gpu": "L40S", "time_scale": 20}}]
    process = await start(SERVE, settings(tmp_path, port, instances=instances))
    try:
        for number in range(2):
            target = f"127.0.0.1:{port + number}"
            assert await wait_until_serving(target, service="penstock.v1.GeneratorService", timeout_s=45)
            async with open_channel(target) as channel:
                stub = generator_pb2_grpc.GeneratorServiceStub(channel)
                view = await call(stub.GetGenerator, generator_pb2.GetGeneratorRequest(), peer="generator")
            assert view.generator_id.startswith(f"gen-0-{number}-")
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
