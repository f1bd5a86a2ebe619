"""What a run's section `data` names, as the document says it: files, and rewards of sources."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.config import Document


def data_files(data: Document) -> Iterator[tuple[str, Document, str]]:
    """Every file of rows: the setting that names it, and the mapping and key that hold its path or address."""
    for name in ("train", "eval"):
        sources = _sources(data, name)
        if sources is None and data.get(name) is not None:
            yield f"data.{name}", data, name
        for index, source in enumerate(sources or ()):
            for key in ("path", "eval"):
                if source.get(key) is not None:
                    yield f"data.{name}.{index}.{key}", source, key


def source_rewards(data: Document) -> dict[str, Any]:
    """The rewards of sources that have their own, by the source's name."""
    found: dict[str, Any] = {}
    for name in ("train", "eval"):
        for source in _sources(data, name) or ():
            if (reward := source.get("reward")) is not None:
                found[source["name"]] = {"model": reward} if isinstance(reward, str) else reward
    return found


def _sources(data: Document, name: str) -> list[Document] | None:
    """The sources of a list; None if it is no list."""
    stated = data.get(name)
    stated = [stated] if isinstance(stated, dict) else stated
    return list(stated) if isinstance(stated, list | tuple) else None
