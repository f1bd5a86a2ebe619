"""Has a run's model and data on this machine's disk before anything reads them."""

from __future__ import annotations

from pathlib import Path

from penstock.storage.fetched import fetched, forget_copies
from services.trainer.config import TrainingConfig


def fetch_sources(config: TrainingConfig) -> None:
    """Fetch what the run names by addresses, as it is there now; raises ConfigError, StorageError."""
    forget_copies()
    _ = config.model.folder
    for field, source in config.data.files.items():
        fetched(field, source)


def stored_sources(config: TrainingConfig) -> str:
    """The addresses, for display; empty if the run names only paths."""
    sources = (config.model.path, *config.data.files.values())
    return ", ".join(source for source in sources if not isinstance(source, Path))
