"""Writes one process' part of published weights and of checkpoints, and finds the checkpoint that is read.

Both are copied in the caller's thread and written in one thread each, so that training continues meanwhile. Weights and
optimiser state are safetensors: nothing is unpickled.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor

from penstock.config import ConfigError
from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from penstock.storage.storage import FileDigest
from services.trainer.checkpoints.tensor_copies import write_copies
from services.trainer.data.tokenizer_files import copy_tokenizer
from services.trainer.model.backend import CheckpointUnavailableError
from services.trainer.model.ranks import Ranks
from services.trainer.model.trained_model import TrainedModel
from services.trainer.model_state.agreement import Writers
from services.trainer.model_state.dcp import FOLDER as RESUME_FOLDER
from services.trainer.model_state.dcp import write_resume
from services.trainer.model_state.optimizer_state import TrainingState
from services.trainer.model_state.shard_upload import upload_shards
from services.trainer.model_state.weight_digests import digest_together
from services.trainer.model_state.weight_file import Part, write_together
from services.trainer.publishing.written_weights import WrittenWeights

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RankFiles:
    """The files of one process; with several, each makes the same calls in the same order.

    Args:
        trained: The model.
        state: Weights and optimiser moments, as a checkpoint holds them.
        model_path: The folder that the model was loaded from.
        ranks: The processes that write together.
        parts: This process' share of tensors, by name.
    """

    def __init__(
        self,
        trained: TrainedModel,
        state: TrainingState,
        *,
        model_path: Path,
        ranks: Ranks,
        parts: Callable[[Mapping[str, Tensor]], dict[str, Part]],
    ) -> None:
        self._trained, self._state, self._model_path = trained, state, model_path
        self._ranks, self._parts = ranks, parts
        self._own_shard: str | None = None
        """Name of the file that this process wrote into the newest checkpoint's `resume/`."""
        self._checkpoint_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._publish_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publish")

    def publish(self, path: Path) -> Future[WrittenWeights]:
        """Copies this process' part of the weights in the published type, and writes it in the background."""
        copies = {name: part.copied() for name, part in self._parts(self._trained.state_tensors()).items()}
        return self._publish_thread.submit(self._publish, path, copies)

    def save(self, directory: Path, *, num_batches: int, max_copied_bytes: float) -> Future[None]:
        """Writes this process' part of a checkpoint, in the background if there is memory for copies."""
        resume = self._state.collect(num_batches=num_batches)
        write = partial(self._save, directory)
        return write_copies(self._checkpoint_thread, write, resume, max_copied_bytes=max_copied_bytes)

    def upload(self, directory: Path, address: Address) -> Future[dict[str, FileDigest]]:
        """Copies this process' own shard of a checkpoint to object storage, in the thread that wrote it."""
        return self._checkpoint_thread.submit(self._upload, directory, address)

    def on_disk(self, source: Path | Address) -> Path:
        """A checkpoint's folder, fetched in all processes if it has an address. Raises CheckpointUnavailableError."""
        if isinstance(source, Path):
            return source
        directory, problem = Path(), ""
        try:
            directory = fetched("run.checkpoint_storage", source)
        except (ConfigError, OSError) as error:
            problem = str(error)
        if not self._ranks.agree(not problem):
            raise CheckpointUnavailableError(problem or f"{source}: another process could not fetch it")
        return directory

    def close(self) -> None:
        """Waits for the files that are being written."""
        for thread in (self._checkpoint_thread, self._publish_thread):
            thread.shutdown(wait=True)

    def _publish(self, path: Path, copies: dict[str, Part]) -> WrittenWeights:
        writers = self._writers(self._ranks.publish_group)
        begun_s = time.monotonic()
        write_together(path, copies, writers=writers, metadata=self._trained.weights_metadata)
        # The digests are those of the file.
        copies.clear()
        written_s = time.monotonic()
        written = digest_together(path, writers=writers)
        return replace(written, write_s=written_s - begun_s, digest_s=time.monotonic() - written_s)

    def _save(self, directory: Path, resume: dict[str, Tensor]) -> None:
        group = self._ranks.checkpoint_group
        own_folder = self._own_folder(directory)
        if own_folder != directory:
            shutil.rmtree(own_folder, ignore_errors=True)
            own_folder.mkdir(parents=True)
        # DCP takes shards of one mesh alone; what is not sharded is a process' own, or the same in all.
        own = {name: tensor for name, tensor in resume.items() if not self._ranks.is_copy(tensor)}
        shard = write_resume(own, own_folder, group=group)
        self._own_shard = None if shard is None else shard.name
        write_together(
            directory / self._trained.weights_file,
            self._parts(self._state.weights_in(resume)),
            writers=self._writers(group),
            metadata=self._trained.weights_metadata,
        )
        if self._ranks.rank > 0:
            return
        try:
            self._trained.complete(directory)
        except SafetensorError as error:
            raise OSError(f"{directory}: {error}") from error
        copy_tokenizer(self._model_path, directory)

    def _upload(self, directory: Path, address: Address) -> dict[str, FileDigest]:
        folder = self._own_folder(directory)
        shard = None if self._own_shard is None else folder / RESUME_FOLDER / self._own_shard
        writers = self._writers(self._ranks.checkpoint_group)
        try:
            return upload_shards(shard if shard is not None and shard.is_file() else None, address, writers=writers)
        finally:
            if folder != directory:
                shutil.rmtree(folder, ignore_errors=True)

    def _own_folder(self, directory: Path) -> Path:
        """Where this process writes its part of a checkpoint: in its folder, or beside it if that is elsewhere."""
        is_beside = self._writers(None).is_beside
        return directory if is_beside else directory.parent / f".process-{self._ranks.rank}"

    def _writers(self, group: ProcessGroup | None) -> Writers:
        ranks = self._ranks
        return Writers(rank=ranks.rank, num_ranks=ranks.num_ranks, group=group, beside=ranks.beside)
