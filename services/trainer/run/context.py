"""Holds the state shared by the parts of a run: its specification, its broker, its progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from penstock.clients.broker import BrokerClient
from penstock.clock import Clock
from penstock.errors import FencedError
from penstock.model.routers import read_routers
from penstock.storage.addresses import Address, below
from penstock.v1 import broker_pb2
from penstock.wire.routes import RoutingShape
from services.trainer.config import TrainingConfig
from services.trainer.data.prompt_order import Tokenizer
from services.trainer.folders.run_instance import RunInstance, write_instance
from services.trainer.model.backend import Backend
from services.trainer.reporting.progress import Progress
from services.trainer.run_sections import SamplePolicyConfig
from services.trainer.step.critic_apart import RemoteCritic

# Generators and reward workers renew every few seconds; this long after one is lost, its work goes to another.
LEASE_S = 15


KeepOwner = Callable[[broker_pb2.RunOwner], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model to train, and the tokenizer for its prompts."""

    backend: Backend
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """Which run, and how."""

    run_id: str
    config: TrainingConfig
    run_dir: Path
    resume: bool
    resumes: broker_pb2.RunOwner | None = None
    """On an automatic resume, the last owner that the trainer knows: it takes the run over only if no other trainer has
    done so since. None when the run was requested."""

    is_apart: bool = False
    """Whether its folder is shared with no trainer on another machine, where the run may have gone on since."""

    @property
    def checkpoint_folder(self) -> Address | None:
        """Where the run's checkpoints are in object storage; None if they are not."""
        storage = self.config.run.checkpoint_storage
        return None if storage is None else below(storage, self.run_id)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """A run in progress, as its parts see it."""

    spec: RunSpec
    client: BrokerClient
    progress: Progress
    version_lock: asyncio.Lock
    """Held while the run's version is changed or reported to the broker: reporting an old one would rewind the run."""
    clock: Clock
    owner: broker_pb2.RunOwner = field(default_factory=broker_pb2.RunOwner)
    """The owner name under which this trainer calls the broker; its epoch is 0 until it has taken the run over."""
    critic: RemoteCritic | None = None
    """The critic, if it is a service of its own."""
    keep_owner: KeepOwner = lambda owner: None
    """Called before and after a take-over with the name and newest epoch that the next process must know; may block."""

    @property
    def config(self) -> TrainingConfig:
        """The run's configuration."""
        return self.spec.config

    @cached_property
    def routing(self) -> RoutingShape | None:
        """The form of the routes that are replayed; None without. Raises NoRoutersError."""
        if not self.config.algorithm.routing_replay:
            return None
        return read_routers(self.config.model.folder, field="algorithm.routing_replay").shape

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.spec.run_id

    async def take_over(self) -> broker_pb2.OpenRunResponse:
        """Create the run or become its trainer: its previous trainer is fenced from now on.

        From now on the client's calls name this owner. Call with `version_lock` held. Raises what
        `BrokerClient.open_run` does, and OSError.
        """
        owner = self.owner
        self.client.owner = broker_pb2.RunOwner(
            instance_id=owner.instance_id, owner_id=owner.owner_id, epoch=self.progress.epoch
        )
        # Recorded first: if this process dies before the answer, the next one recognises the take-over as its own.
        known = self.spec.resumes.epoch if self.spec.resumes is not None else self.progress.epoch
        await asyncio.to_thread(self.keep_owner, broker_pb2.RunOwner(owner_id=owner.owner_id, epoch=known))
        response = await self.open_run(self.progress.policy_version, takes_over=True)
        owner.epoch = self.progress.epoch = response.epoch
        self.progress.history = response.history
        self.client.owner = owner
        await asyncio.to_thread(self.keep_owner, owner)
        instance = RunInstance(instance_id=owner.instance_id, epoch=owner.epoch)
        await asyncio.to_thread(write_instance, self.spec.run_dir, instance)
        return response

    async def check_owner(self) -> None:
        """Raises FencedError if another trainer has taken over the run, and what `BrokerClient.get_run` does."""
        self.check_view(await self.client.get_run(self.run_id))

    def check_view(self, view: broker_pb2.GetRunResponse) -> None:
        """The same check, on a snapshot of the run."""
        mine, owner = self.owner, view.owner
        if mine.epoch and owner.owner_id != mine.owner_id and owner.epoch >= mine.epoch:
            since = f"{view.owner_time.ToDatetime():%Y-%m-%d %H:%M:%S} UTC"
            raise FencedError(
                f"fenced: trainer {owner.owner_id!r} took run {self.run_id!r} over at {since} (epoch {owner.epoch}, "
                f"this one's is {mine.epoch}); this trainer must end",
                run_id=self.run_id,
                owner_id=owner.owner_id,
            )

    async def open_run(self, policy_version: int, *, takes_over: bool = False) -> broker_pb2.OpenRunResponse:
        """Send the broker the step log and return how the run stands; call with `version_lock` held.

        Args:
            policy_version: The trainer's version.
            takes_over: Create the run or become its trainer, and rewind it if it is ahead; raises what
                `BrokerClient.open_run` does.
        """
        algorithm = self.config.algorithm
        limits = broker_pb2.RunLimits(
            groups_per_step=algorithm.prompts_per_step,
            group_size=algorithm.group_size,
            max_staleness=algorithm.max_staleness,
            max_completion_tokens=self.config.sampling.max_new_tokens,
        )
        limits.generation_lease.FromSeconds(LEASE_S)
        limits.scoring_lease.FromSeconds(LEASE_S)
        if (silence_s := self.config.trainer.max_lease_silence_s) is not None:
            limits.token_silence.FromNanoseconds(round(silence_s * 1e9))
        if self.routing is not None:
            limits.routing.CopyFrom(self.routing.to_proto())
        return await self.client.open_run(
            self.run_id,
            limits=limits,
            policy=run_policy(
                self.config.policy,
                needs_reference_logprobs=algorithm.has_scorer,
                has_environment=self.config.environment is not None,
            ),
            policy_version=policy_version,
            steps=self.progress.step_records(),
            takes_over=takes_over,
            resumes=self.spec.resumes if takes_over else None,
        )


def run_policy(
    config: SamplePolicyConfig, *, needs_reference_logprobs: bool = False, has_environment: bool = False
) -> broker_pb2.RunPolicy:
    """The policy in the broker's form; its enum names are the configuration's words in capitals."""
    return broker_pb2.RunPolicy(
        stale=broker_pb2.StalePolicy.Value(f"STALE_POLICY_{config.stale.upper()}"),
        partial_groups=broker_pb2.PartialGroupPolicy.Value(f"PARTIAL_GROUP_POLICY_{config.partial_groups.upper()}"),
        drops_zero_variance=config.drops_zero_variance,
        num_extra_samples=config.num_extra_samples,
        num_retained_steps=config.num_retained_steps,
        max_retained_bytes=config.max_retained_bytes,
        dispatch=config.dispatch,
        token_shards=config.token_shards,
        needs_reference_logprobs=needs_reference_logprobs,
        has_environment=has_environment,
    )
