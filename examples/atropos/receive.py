"""Takes groups of Atropos' environments into a run: python receive.py 127.0.0.1:7301 RUN --listen 127.0.0.1:8300.

Environments find here what Atropos' own server offers them (rollout_server_url=http://127.0.0.1:8300), and sample at a
generator's endpoint. Groups state by `group_overrides.policy_version` which version sampled them; Atropos' environments
do not, so --age says how many versions back from now a group may have begun: the oldest that is possible.
"""

import argparse
import asyncio
import hashlib
import json
from typing import Any

from aiohttp import web

from penstock.clients import BrokerClient, Security
from penstock.errors import InvalidFieldError
from penstock.wire.scored_data import read_scored_data

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_ENVIRONMENTS = 1024


class Receiver:
    """The routes that environments call."""

    def __init__(self, broker: BrokerClient, producer: Any, run_id: str, *, age: int | None) -> None:
        self.broker, self.producer, self.run_id, self.age = broker, producer, run_id, age
        self.names: list[str] = []

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/register-env", self.register)
        app.router.add_post("/disconnect-env", self.disconnect)
        app.router.add_get("/status-env", self.status)
        app.router.add_get("/status", self.status)
        app.router.add_get("/info", self.info)
        app.router.add_get("/wandb_info", self.info)
        app.router.add_post("/scored_data", self.scored)
        app.router.add_post("/scored_data_list", self.scored)
        return app

    async def register(self, request: web.Request) -> web.Response:
        asked = await request.json()
        if len(self.names) >= MAX_ENVIRONMENTS:
            return failure(429, f"{MAX_ENVIRONMENTS} environments are registered")
        name = str(asked.get("desired_name", "environment"))[:64]
        self.names.append(name)
        about = {"env_id": len(self.names) - 1, "wandb_name": f"{name}_{self.names.count(name) - 1}"}
        where = {"checkpoint_dir": "", "checkpoint_interval": 0, "num_steps": 2**31 - 1}
        return web.json_response({"status": "success", **about, **where, "starting_step": await self.version()})

    async def disconnect(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "success"})

    async def status(self, _: web.Request) -> web.Response:
        # A full run holds `put` back, and with it the environment's request: nothing queues here.
        place = {"queue_size": 0, "self_queue_size": 0, "unallocated_fraction": 1.0, "max_group_size": 1}
        return web.json_response({"current_step": await self.version(), "env_weight": 1.0, **place})

    async def info(self, _: web.Request) -> web.Response:
        return web.json_response({"batch_size": -1, "max_token_len": -1, "group": None, "project": None})

    async def scored(self, request: web.Request) -> web.Response:
        document = await request.json()
        version = None if self.age is None else max(0, await self.version() - self.age)
        try:
            documents = document if isinstance(document, list) else [document]
            groups = [read_scored_data(each, group_id=group_id(each), policy_version=version) for each in documents]
        except (InvalidFieldError, AttributeError) as error:
            return failure(422, str(error))
        receipt = await (await self.producer.put(groups))
        if receipt.refused:
            return failure(409, "; ".join(each.message for each in receipt.refused))
        counted = {"groups_processed": len(groups)} if isinstance(document, list) else {}
        return web.json_response({"status": "received", **counted})

    async def version(self) -> int:
        return int((await self.broker.get_run(self.run_id)).policy_version)


def group_id(document: Any) -> str:
    """Names a group by its content: environments post again what was not answered, and it counts once."""
    content = json.dumps(document, sort_keys=True).encode()
    return f"atropos-{hashlib.blake2b(content, digest_size=16).hexdigest()}"


def failure(status: int, error: str) -> web.Response:
    return web.json_response({"status": "failure", "error": error}, status=status)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("broker", help="its address, host:port")
    parser.add_argument("run", help="the run's id")
    parser.add_argument("--listen", default="127.0.0.1:8300", help="an address of this machine alone: anyone may put")
    parser.add_argument("--age", type=int, help="versions back from now that groups may have begun")
    options = parser.parse_args()
    host, _, port = options.listen.rpartition(":")
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        parser.error(f"--listen: {options.listen}; this server asks for no credential and listens on loopback alone")
    security = Security.from_environment()
    async with BrokerClient(options.broker, security=security) as broker, broker.producer(options.run) as producer:
        receiver = Receiver(broker, producer, options.run, age=options.age)
        runner = web.AppRunner(receiver.application())
        await runner.setup()
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
