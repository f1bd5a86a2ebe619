"""Turns leases into log-probs: packs as the trainer's, one after the other.

Invariants:
- Every lease taken is answered with exactly one result, or was lost to another scorer meanwhile.
- A sample that cannot be computed gets a failed result that says why, and costs its neighbours nothing: a pack whose
  pass fails is computed again sample by sample.
- One pass is under way at a time; further leases wait with the source, which bounds them.
- No endless wait: a pass that hangs ends `run`, so that its leases are no longer renewed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog

from penstock.errors import InvalidFieldError
from penstock.tracing.measuring import measuring
from penstock.tracing.recording import Value
from penstock.tracing.sampled import BatchLinks
from penstock.v1 import broker_pb2
from services.trainer.batches.packing import Pack, Trajectory, join, pack_trajectories
from services.trainer.compute.speed import Speed
from services.trainer.scorer.leased_samples import failed_result, result_of, trajectory_of
from services.trainer.scorer.metrics import BATCH_SECONDS, HELD_SAMPLES, SAMPLES, TOKENS

_Lease = broker_pb2.ScoringLease
_log = structlog.get_logger()


class LeaseSource(Protocol):
    """Where leases come from and results go; bounded by its own credits."""

    @property
    def num_held(self) -> int:
        """Leases not answered yet."""
        ...

    async def take(self, *, max_items: int) -> list[_Lease]:
        """At least one lease, each handed out once; waits while there is none."""
        ...

    def is_held(self, lease_id: str) -> bool:
        """Whether the lease still counts."""
        ...

    def answer(self, results: Sequence[broker_pb2.ScoreResult]) -> None:
        """Take results; those of lost leases are ignored."""
        ...


class Model(Protocol):
    """See `FrozenModel`."""

    vocab_size: int
    max_sequence_length: int

    def logprobs(self, pack: Pack) -> npt.NDArray[np.float32]:
        """Log-probs of the pack's loss tokens, float32[N]."""
        ...


class HungPassError(Exception):
    """A pass did not end in time; nothing can end it but the end of the process."""


class LogprobPool:
    """Answers what a source hands out, with one model."""

    def __init__(
        self, source: LeaseSource, model: Model, *, tokens_per_pack: int, max_batch_size: int, max_pass_s: float
    ) -> None:
        self._source = source
        self._max_pass_s = max_pass_s
        self._model = model
        self._tokens_per_pack = tokens_per_pack
        self._max_batch_size = max_batch_size
        self.speed = Speed()

    async def run(self) -> None:
        """Work until cancelled. Raises HungPassError."""
        while True:
            leases = await self._source.take(max_items=self._max_batch_size)
            begun_s = time.monotonic()
            await self._answer(leases)
            BATCH_SECONDS.observe(time.monotonic() - begun_s)

    async def _answer(self, leases: Sequence[_Lease]) -> None:
        HELD_SAMPLES.set(self._source.num_held)
        readable: list[tuple[_Lease, Trajectory]] = []
        for lease in leases:
            try:
                readable.append((lease, self._read(lease)))
            except InvalidFieldError as error:
                self._send([failed_result(lease, error)])
        trajectories = [trajectory for _lease, trajectory in readable]
        for pack in pack_trajectories(trajectories, max_pack_tokens=self._tokens_per_pack):
            members = {member: readable[member][0] for member in pack.members}
            # A pass for samples that all went to another scorer would be wasted.
            if any(self._source.is_held(lease.lease_id) for lease in members.values()):
                await self._answer_pack(pack, members, trajectories)
        HELD_SAMPLES.set(self._source.num_held)

    async def _answer_pack(self, pack: Pack, leases: Mapping[int, _Lease], trajectories: Sequence[Trajectory]) -> None:
        size: dict[str, Value] = {"rl.reference.samples": len(leases), "rl.tokens": pack.num_tokens}
        run_id = next(iter(leases.values())).item.run_id
        with measuring("rl.reference.score", size, run_id=run_id) as measured:
            links = BatchLinks(leases.values(), measured.links)
            results = await self._computed(pack, leases, trajectories)
            failed = list(filter(_is_failed, results))
            links.note_failed(failed)
            measured.error = failed[0].score.message if failed else ""
        self._send(results)

    async def _computed(
        self, pack: Pack, leases: Mapping[int, _Lease], trajectories: Sequence[Trajectory]
    ) -> list[broker_pb2.ScoreResult]:
        try:
            async with asyncio.timeout(self._max_pass_s):
                return await asyncio.to_thread(self._results, pack, leases, trajectories)
        except TimeoutError:
            raise HungPassError(
                f"a pass over {pack.num_tokens} tokens took longer than {self._max_pass_s:g} s"
            ) from None

    def _read(self, lease: _Lease) -> Trajectory:
        return trajectory_of(lease, vocab_size=self._model.vocab_size, max_tokens=self._model.max_sequence_length)

    def _results(
        self, pack: Pack, leases: Mapping[int, _Lease], trajectories: Sequence[Trajectory]
    ) -> list[broker_pb2.ScoreResult]:
        """The results of a pack's samples, by its members."""
        try:
            with self.speed.computing(pack.num_tokens):
                found = pack.by_member(self._model.logprobs(pack))
        except RuntimeError as error:  # PyTorch's, memory that does not suffice among them
            _log.warning("a pack's pass failed", num_samples=len(leases), num_tokens=pack.num_tokens, error=str(error))
            if len(leases) == 1:
                return [failed_result(lease, error) for lease in leases.values()]
            return [
                result
                for member, lease in leases.items()
                for result in self._results(join(trajectories, [member]), {member: lease}, trajectories)
            ]
        self.speed.settle()
        TOKENS.inc(pack.num_tokens)
        return [result_of(leases[member], logprobs) for member, logprobs in found]

    def _send(self, results: Sequence[broker_pb2.ScoreResult]) -> None:
        failed = [result for result in results if _is_failed(result)]
        SAMPLES.labels("ok").inc(len(results) - len(failed))
        SAMPLES.labels("failed").inc(len(failed))
        if failed:
            _log.warning("samples without log-probs", num_samples=len(failed), latest=failed[-1].score.message)
        for result in failed:
            key = result.key
            _log.info(
                "sample without log-probs",
                group_id=key.group_id,
                sample_index=key.sample_index,
                attempt=key.attempt,
                message=result.score.message,
            )
        self._source.answer(results)


def _is_failed(result: broker_pb2.ScoreResult) -> bool:
    return not result.HasField("reference_logprobs")
