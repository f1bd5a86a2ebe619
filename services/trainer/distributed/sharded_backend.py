"""The backend of a run whose model is sharded over several processes: process 0 makes the others repeat its calls.

- Every call is made in all processes, in the same order: sent, done here, answered by all.
- A process that ends, or fails with anything but a BackendError, breaks the group for good: no further call is
  possible, not even to report it. Then `on_lost` is called; in a trainer it ends the process, whose restart resumes
  the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.storage import FileDigest
from penstock.v1.weights_pb2 import AdapterInfo
from services.trainer.batches.packing import Pack
from services.trainer.distributed.process_group import Arrays, RankGroup
from services.trainer.distributed.rank_worker import encoded
from services.trainer.folders.same_files import fingerprint_of, mark_in
from services.trainer.model.backend import Backend, BackendError, LossTotals, Quantity, StepMetrics
from services.trainer.publishing.written_weights import WrittenWeights

if TYPE_CHECKING:
    from torch import Tensor

_Result = TypeVar("_Result")
Answer = tuple[dict[str, Any], Arrays]


class ShardedBackend:
    """A `Backend` whose every call is made in all processes.

    Args:
        group: The joined group; the others run `rank_worker.follow`.
        build: Makes this process' part.
        config_json: The configuration from which the others make theirs.
        shares: Relative capacity of each process.
        on_lost: Called with the reason when the group has broken.
        on_close: Called when the group has been closed.
        files: The run folder and the model, if some processes are on other machines.
        needs_one_folder: Whether all of them must see the run folder, as checkpoints are nowhere else.

    Raises:
        BackendError: A process cannot hold its part.
        ConfigError: A process sees other files.
    """

    def __init__(
        self,
        group: RankGroup,
        *,
        build: Callable[[RankGroup], Backend],
        config_json: str,
        shares: Sequence[float],
        on_lost: Callable[[str], None],
        on_close: Callable[[], None],
        files: tuple[Path, Path | Address] | None = None,
        needs_one_folder: bool = True,
    ) -> None:
        self._group = group
        self._others = range(1, group.num_ranks)
        self._on_lost = on_lost
        self._on_close = on_close
        self.shares = tuple(shares)
        try:
            if files is not None:
                self._compare(*files, needs_one_folder=needs_one_folder)
            beside = None if group.beside is None else sorted(group.beside)
            self._local, _ = self._everywhere("build", lambda: build(group), config=config_json, beside=beside)
        except (BackendError, ConfigError):
            self._leave()
            raise

    @property
    def is_spread(self) -> bool:
        """The same in every process."""
        return self._local.is_spread

    @property
    def vocab_size(self) -> int:
        """The same in every process."""
        return self._local.vocab_size

    @property
    def max_sequence_length(self) -> int:
        """The same in every process."""
        return self._local.max_sequence_length

    @property
    def adapter(self) -> AdapterInfo | None:
        """The same in every process."""
        return self._local.adapter

    def forward_backward(self, *packs: Pack | None) -> LossTotals:
        """Gives each process its pack, or that of its pipeline; the totals are those of all."""
        totals, answers = self._call(self._local.forward_backward, *packs)
        for answer, logprobs in answers:
            totals = totals.merged(LossTotals(**answer["totals"], logprobs=tuple(logprobs.values())))
        return totals

    def score(self, *packs: Pack | None, quantity: Quantity) -> list[npt.NDArray[np.float32]]:
        """Gives each process its pack."""
        mine, answers = self._call(self._local.score, *packs, quantity=quantity)
        found = [*mine, *(results["numbers"] for _, results in answers)]
        return [found[rank] for rank in self._group.scorers]

    def refresh_reference(self) -> None:
        """Every process refreshes its part."""
        self._call(self._local.refresh_reference)

    def optimizer_step(self, *, divisor: int, is_last: bool = True) -> StepMetrics:
        """Every process steps its part; the numbers are those of the whole."""
        if divisor < 1:
            raise ValueError(f"a step needs at least one token or sample, not {divisor}")
        return self._call(self._local.optimizer_step, divisor=divisor, is_last=is_last)[0]

    def discard_gradients(self) -> None:
        """Every process discards its part."""
        self._call(self._local.discard_gradients)

    def state_tensors(self) -> dict[str, Tensor]:
        """Gathered here, on the CPU."""
        return self._call(self._local.state_tensors)[0]

    def write_weights(self, path: Path) -> Future[WrittenWeights]:
        """Every process writes its own part."""
        return self._call(self._local.write_weights, path=path)[0]

    def save(self, directory: Path) -> Future[None]:
        """Every process writes its own part."""
        return self._call(self._local.save, directory=directory)[0]

    def upload(self, directory: Path, address: Address) -> Future[dict[str, FileDigest]]:
        """Every process copies its own part."""
        return self._call(self._local.upload, directory=directory, address=address)[0]

    def load(self, source: Path | Address) -> None:
        """Every process reads its part."""
        self._call(self._local.load, source=source)

    def close(self) -> None:
        """Ends the other processes."""
        self._local.close()
        self._leave()

    def _compare(self, run_dir: Path, model: Path | Address, *, needs_one_folder: bool) -> None:
        """Note who sees the run folder; raises ConfigError where what processes see cannot make one run."""
        with mark_in(run_dir) as mark:
            own = fingerprint_of(model)
            _, answers = self._everywhere("compare", lambda: None, path=mark, model=model, fingerprint=own)
        found = [answer["difference"] for answer, _ in answers if answer["difference"] is not None]
        away = {rank: answer["away"] for rank, (answer, _) in enumerate(answers, 1) if answer["away"] is not None}
        if needs_one_folder:
            found += away.values()
        if found:
            raise ConfigError("; ".join(dict.fromkeys(found)))
        if away:
            self._group.beside = frozenset(range(self._group.num_ranks)) - away.keys()

    def _leave(self) -> None:
        for rank in self._others:
            self._group.send({"op": "close"}, to=rank)
        self._group.close()
        self._on_close()

    def _call(
        self, method: Callable[..., _Result], *packs: Pack | None, **details: Any
    ) -> tuple[_Result, list[Answer]]:
        """A method of this process' part and the same of all others', each with its own pack."""
        # Process 0 has the first.
        return self._everywhere(method.__name__, lambda: method(*packs[:1], **details), packs=packs, **details)

    def _everywhere(
        self, op: str, here: Callable[[], _Result], *, packs: Sequence[Pack | None] = (), **details: Any
    ) -> tuple[_Result, list[Answer]]:
        """What `here` returns, and the others' answers, in order."""
        try:
            for rank in self._others:
                arrays = encoded(packs[self._group.pack_of(rank)]) if packs else None
                self._group.send({"op": op, "has_pack": bool(packs), **details}, arrays, to=rank)
            try:
                result = here()
            except BackendError:
                self._answers()
                raise
            answers = self._answers()
        except BackendError:
            raise
        except Exception as error:
            self._on_lost(f"the processes of this trainer lost each other in {op}: {error}")
            raise
        said = [answer.get("refused") for answer, _ in answers]
        refused = [f"process {rank}: {why}" for rank, why in enumerate(said, 1) if why is not None]
        if refused:
            raise BackendError("; ".join(refused))
        return result, answers

    def _answers(self) -> list[Answer]:
        return [self._group.receive(sender=rank) for rank in self._others]
