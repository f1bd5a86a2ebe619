"""The soak's fleet: Redis, two brokers with wrong clocks, two generators, two reward workers, trainer, scheduler.

    generators, reward workers, trainer --(a link to each broker)--> brokers --(a link each)--> Redis
    generators --(links to the trainer: gRPC, weights)--> the trainer of the moment

Every service is a `penstock serve` of its own with a supervisor that starts it again; no `penstock run` is there. The
trainer is told to start the run once: whatever becomes of it later, it or its successor goes on by itself.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from console.config.config import RunConfig
from console.config.derive import Addresses, Endpoint, generator_config, trainer_config, training_config, write_config
from console.config.run_folder import RunFolder
from console.run.quick import Task, quickstart_config
from penstock.config import StrictModel
from penstock.errors import PenstockError
from penstock.network.rpc import call, open_channel
from penstock.v1 import broker_pb2, broker_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from services.broker.config import BrokerConfig
from services.reward.config import RewardConfig, RewardModelConfig
from services.scheduler.config import LengthsConfig, SchedulerConfig
from tests.helpers.console import COMMAND, environment
from tests.helpers.ports import free_address
from tests.helpers.proxies.tcp_proxy import TcpProxy
from tests.helpers.stores.redis_server import RedisProcess
from tests.soak.members import Member
from tests.soak.skewed import set_offset

RUN_ID = "soak"
NUM_BROKERS = NUM_GENERATORS = NUM_REWARD_WORKERS = 2
CLOCK_OFFSETS_S = (3600.0, -3600.0)
"""How wrong each broker's wall clock is to begin with."""
SUPERVISE_S = 0.2


class Fleet:
    """See the module. An async context manager: nothing is left behind."""

    def __init__(self, folder: Path, task: Task, *, engine: str, overrides: list[str]) -> None:
        self.folder = folder
        self.redis = RedisProcess(folder / "redis", is_persistent=True, fsync="everysec")
        self.members: dict[str, Member] = {}
        self.links: dict[str, TcpProxy] = {}
        self.clock_offsets_s = list(CLOCK_OFFSETS_S)
        self.broker_addresses: list[str] = []
        """Of the brokers themselves; no link is in the way."""
        self.trainer_name = ""
        """Of the member that is the trainer now."""
        self._engine = engine
        self._config = self._run_config(task, overrides)
        self._num_trainers = 0
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def run_folder(self) -> RunFolder:
        """The trainer's."""
        return RunFolder(self.folder / "runs" / RUN_ID)

    async def __aenter__(self) -> Fleet:
        """Start everything, and the run."""
        for name in ("redis", "runs", "logs", "configs", "cache"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.redis.start()
        self._supervisor = asyncio.create_task(self._supervise())
        scheduler = self._add_scheduler()
        for index in range(NUM_BROKERS):
            await self._add_broker(index, scheduler)
        for name in ("trainer-link", "weights-link"):
            self.links[name] = TcpProxy(1)
            await self.links[name].start()
        self.add_trainer()
        await self.start_run(resume=False)
        judge = self._add_judge()
        for index in range(NUM_REWARD_WORKERS):
            self._add_reward_worker(index, judge)
        for index in range(NUM_GENERATORS):
            self._add_generator(index)
        return self

    async def __aexit__(self, *_exception: object) -> None:
        """End everything."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        for member in self.members.values():
            member.kill()
        self.redis.kill()
        for link in self.links.values():
            await link.stop()

    # -- members -------------------------------------------------------------------------------------------------------

    @property
    def brokers(self) -> str:
        """The brokers as services see them, through the links."""
        return ",".join(self.links[f"broker-{index}-link"].address for index in range(NUM_BROKERS))

    @property
    def trainer(self) -> Member:
        """The trainer of the moment."""
        return self.members[self.trainer_name]

    def jump_clock(self, index: int, by_s: float) -> None:
        """Move a broker's wall clock."""
        self.clock_offsets_s[index] += by_s
        set_offset(self.folder / f"clock-{index}", self.clock_offsets_s[index])

    def add_trainer(self) -> None:
        """Begin a trainer and make it the one that generators reach; an older one is left as it is."""
        listen, weights = (free_address() for _ in range(2))
        self.trainer_name = f"trainer-{self._num_trainers}"
        self._num_trainers += 1
        addresses = self._addresses(trainer=Endpoint(target=listen, listen=listen), weights_listen=weights)
        settings = trainer_config(self._config, addresses).model_copy(update={"state_dir": self.folder / "trainers"})
        self._serve("trainer", settings, name=self.trainer_name)
        for link, address in (("trainer-link", listen), ("weights-link", weights)):
            self.links[link].target_port = int(address.rpartition(":")[2])
            self.links[link].cut()
        self._trainer_address = listen

    async def start_run(self, *, resume: bool) -> None:
        """Hand the run to the trainer of the moment, as soon as it listens."""
        document = training_config(self._config, broker=self.brokers, source="soak").model_dump_json()
        request = trainer_pb2.StartRunRequest(run_id=RUN_ID, config_json=document, resume=resume)
        async with open_channel(self._trainer_address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            for _ in range(300):
                with suppress(PenstockError):
                    await call(stub.StartRun, request, peer="trainer", timeout_s=60)
                    return
                await asyncio.sleep(1.0)
        raise TimeoutError("the trainer did not take the run")

    async def get_trainer(self) -> trainer_pb2.GetTrainerResponse | None:
        """What the trainer of the moment says of itself; None while it does not answer."""
        async with open_channel(self._trainer_address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            with suppress(PenstockError):
                return await call(stub.GetTrainer, trainer_pb2.GetTrainerRequest(), peer="trainer", timeout_s=5)
        return None

    async def stop_run(self) -> None:
        """Ask the trainer of the moment to stop the run."""
        async with open_channel(self._trainer_address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            await call(stub.StopRun, trainer_pb2.StopRunRequest(run_id=RUN_ID), peer="trainer", timeout_s=30)

    async def get_run(self) -> broker_pb2.GetRunResponse | None:
        """The run as the first broker that answers sees it; None when none does."""
        for address in self.broker_addresses:
            async with open_channel(address) as channel:
                stub = broker_pb2_grpc.BrokerServiceStub(channel)
                with suppress(PenstockError):
                    return await call(stub.GetRun, broker_pb2.GetRunRequest(run_id=RUN_ID), peer=address, timeout_s=5)
        return None

    def restart_redis(self) -> None:
        """Start Redis again, without waiting for its data."""
        self.redis.launch()

    def _run_config(self, task: Task, overrides: list[str]) -> RunConfig:
        fixed = [f"run.id={RUN_ID}", f"generator.engine={self._engine}", "optimizer.decay_steps=0"]
        fixed += ["run.num_steps=1000000", "run.num_eval_prompts=0", "data.eval=null", "optimizer.learning_rate=1e-5"]
        fixed += ["generator.max_concurrent_samples=128", "policy.token_shards=3"]
        return quickstart_config([*fixed, *overrides], seed=0, directory=self.folder / "runs", task=task)

    def _addresses(self, *, trainer: Endpoint, weights_listen: str | None = None, listen: str = "") -> Addresses:
        nowhere = Endpoint(target="", listen=None)
        return Addresses(
            broker=Endpoint(target=self.brokers, listen=None),
            scheduler=nowhere,
            reward=nowhere,
            trainer=trainer,
            scorers=(),
            environment=None,
            generators=tuple(Endpoint(target=listen, listen=listen) for _ in range(NUM_GENERATORS)),
            weights_listen=weights_listen,
            weights_url=f"http://{self.links['weights-link'].address}",
        )

    async def _add_broker(self, index: int, scheduler: str) -> None:
        to_redis = self.links[f"redis-{index}-link"] = TcpProxy(self.redis.port)
        await to_redis.start()
        listen = free_address()
        self.broker_addresses.append(listen)
        clock = self.folder / f"clock-{index}"
        set_offset(clock, self.clock_offsets_s[index])
        to_broker = self.links[f"broker-{index}-link"] = TcpProxy(int(listen.rpartition(":")[2]))
        await to_broker.start()
        settings = BrokerConfig(
            listen=listen,
            advertise=to_broker.address,
            redis_url=f"redis://{to_redis.address}/0",
            scheduler=scheduler,
        )
        argv = [sys.executable, "-P", "-m", "tests.soak.skewed", str(clock)]
        self._serve("broker", settings, name=f"broker-{index}", command=argv)

    def _add_scheduler(self) -> str:
        listen = free_address()
        lengths = LengthsConfig(state_dir=self.folder / "lengths")
        self._serve("scheduler", SchedulerConfig(listen=listen, lengths=lengths), name="scheduler")
        return listen

    def _add_judge(self) -> str:
        listen = free_address()
        argv = [*COMMAND, "reward", "serve", "tests.soak.judge:judge", "--listen", listen]
        self._add("judge", argv)
        return listen

    def _add_reward_worker(self, index: int, judge: str) -> None:
        settings = RewardConfig(
            listen=free_address(),
            run_id=RUN_ID,
            broker=self.brokers,
            worker_id=f"reward-{index}",
            tokenizer_path=self._config.model.path,
            reward=RewardModelConfig(model=f"grpc://{judge}"),
        )
        self._serve("reward", settings, name=f"reward-{index}")

    def _add_generator(self, index: int) -> None:
        trainer = Endpoint(target=self.links["trainer-link"].address, listen=None)
        addresses = self._addresses(trainer=trainer, listen=free_address())
        settings = generator_config(self._config, addresses, RunFolder(self.folder / "cache"), index)
        self._serve("generator", settings, name=f"generator-{index}")

    def _serve(self, kind: str, settings: StrictModel, *, name: str, command: list[str] | None = None) -> None:
        path = self.folder / "configs" / f"{name}.json"
        write_config(settings, path)
        self._add(name, [*(command or COMMAND), "serve", kind, "--config", str(path)])

    def _add(self, name: str, argv: list[str]) -> None:
        env = {**environment(), "VLLM_CPU_KVCACHE_SPACE": "1"}
        self.members[name] = Member(name, argv, log=self.folder / "logs" / f"{name}.log", env=env)

    async def _supervise(self) -> None:
        while True:
            for member in self.members.values():
                member.supervise()
            await asyncio.sleep(SUPERVISE_S)


def orphans(folder: Path) -> list[int]:
    """Processes of a soak that are still there, whoever their parent is: they write into its logs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if path.readlink().is_relative_to(folder / "logs"):
                found.append(int(path.parent.parent.name))
    return found
