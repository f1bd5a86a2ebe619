"""Finds the run that a command refers to, and queries its broker and trainer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from console.config.config import load_run_config
from console.config.run_folder import CONSOLE_NAME, RunFolder, is_there, open_folder, read_record
from console.inspect.local_runs import run_folders
from penstock.clients.broker import BrokerClient
from penstock.config import ConfigError
from penstock.errors import DeadlineError, PenstockError, ServiceUnavailableError
from penstock.network.rpc import call, open_channel
from penstock.security import Security
from penstock.targets import checked_addresses, split_targets
from penstock.v1 import trainer_pb2, trainer_pb2_grpc

_NEXT_BROKER_S = 3.0
_TRAINER_TIMEOUT_S = 2.0
_Response = TypeVar("_Response")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A run and the broker that knows it."""

    run_id: str
    broker: str | None
    """host:port, several separated by commas; None if no broker of that run is known to be up."""
    folder: RunFolder | None
    """Its folder on this machine, if any."""
    scheduler: str | None = None
    """host:port; None if no scheduler of that run is known to be up."""
    trainer: str | None = None
    """host:port; None if no trainer of that run is known to be up."""

    def addresses(self) -> Iterator[tuple[str, str]]:
        """Name and address of each service known to be up; several brokers have one name."""
        for name, stated in (("broker", self.broker), ("scheduler", self.scheduler), ("trainer", self.trainer)):
            yield from ((name, address) for address in (split_targets(stated) if stated is not None else ()))


def find_run(run: str | None, *, broker: str | None, runs_dir: Path) -> Target:
    """Find a run by folder, or by id with a broker, else the newest one. Raises ConfigError."""
    if broker is not None:
        return Target(run_id=_id_at_broker(run, _address(broker)), broker=_address(broker), folder=None)
    if run is None:
        folders = run_folders(runs_dir)
        if not folders:
            raise ConfigError(f"{runs_dir}: holds no runs; name a run folder, or a broker with --broker")
        folder = folders[-1]
    else:
        path = Path(run)
        folder = open_folder(path if is_there(path) else runs_dir / run)
    config = load_run_config(folder.config)
    return Target(
        run_id=config.run.id,
        broker=config.endpoints.broker or _local(folder, "broker"),
        folder=folder,
        scheduler=config.endpoints.scheduler or _local(folder, "scheduler"),
        trainer=config.endpoints.trainer or _local(folder, "trainer"),
    )


def _local(folder: RunFolder, service: str) -> str | None:
    """Address of a service started here, while it or its launcher (which would restart it) is alive."""
    records = [read_record(folder.services / f"{name}.json") for name in (service, CONSOLE_NAME)]
    is_alive = any(record is not None and record.is_alive for record in records)
    return records[0].address if records[0] is not None and is_alive else None


def _id_at_broker(run: str | None, broker: str) -> str:
    if run is not None:
        return Path(run).name
    ids = answer_of(broker, BrokerClient.list_runs)
    if not ids:
        raise ConfigError(f"the broker at {broker} knows no runs")
    return ids[-1]


async def get_trainer(trainer: str) -> trainer_pb2.GetTrainerResponse:
    """The trainer's state, and what it waits for; of several addresses the first that answers. Raises PenstockError."""
    *others, last = split_targets(trainer)
    for place in others:
        with contextlib.suppress(ServiceUnavailableError, DeadlineError):
            return await _get_trainer(place)
    return await _get_trainer(last)


async def _get_trainer(trainer: str) -> trainer_pb2.GetTrainerResponse:
    async with open_channel(trainer, Security.from_environment()) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        request = trainer_pb2.GetTrainerRequest()
        return await call(stub.GetTrainer, request, peer=f"trainer {trainer}", timeout_s=_TRAINER_TIMEOUT_S)


async def ask(broker: str, question: Callable[[BrokerClient], Awaitable[_Response]]) -> _Response:
    """Ask a broker. A single broker is asked once; of several, the next one is asked if one does not answer.

    Raises PenstockError.
    """
    patience_s = _NEXT_BROKER_S if "," in broker else 0.0
    async with BrokerClient(broker, security=Security.from_environment(), patience_s=patience_s) as client:
        return await question(client)


def answer_of(broker: str, question: Callable[[BrokerClient], Coroutine[Any, Any, _Response]]) -> _Response:
    """`ask`, for a command without an event loop. Raises ConfigError."""
    try:
        return asyncio.run(ask(broker, question))
    except PenstockError as error:
        raise ConfigError(str(error)) from error


def _address(text: str) -> str:
    try:
        return checked_addresses(text)
    except ValueError as error:
        raise ConfigError(f"--broker: {error}") from error
