"""What a run's document names of its data and rewards: files of rows and of canaries, and rewards of sources."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from penstock.config import Document
from penstock.reasoning_gym.source import is_source, reward_of
from services.trainer.data_config import DataConfig, EvalSource


def data_files(data: Document) -> Iterator[tuple[str, Document, str]]:
    """Every file of rows: the setting that names it, and the mapping and key that hold its path or address."""
    for name in ("train", "eval"):
        sources = _sources(data, name)
        if sources is None and _is_file(data.get(name)):
            yield f"data.{name}", data, name
        for index, source in enumerate(sources or ()):
            for key in ("path", "eval"):
                if _is_file(source.get(key)):
                    yield f"data.{name}.{index}.{key}", source, key


def canary_files(config: Document) -> Iterator[tuple[str, Document, str]]:
    """Every file of canaries, likewise: of the run's reward, and of those of sources."""
    stated = [("reward", config.get("reward"))]
    data = config.get("data", {})
    for name in ("train", "eval"):
        for index, source in enumerate(_sources(data, name) or ()):
            stated.append((f"data.{name}.{index}.reward", source.get("reward")))
    for setting, reward in stated:
        canaries = reward.get("canaries") if isinstance(reward, dict) else None
        if isinstance(canaries, dict) and canaries.get("path") is not None:
            yield f"{setting}.canaries.path", canaries, "path"


def with_absolute_canaries(data: DataConfig) -> DataConfig:
    """The same with the paths of canaries in sources' own rewards made absolute."""
    return data.model_copy(update={name: _with_absolute_canaries(getattr(data, name)) for name in ("train", "eval")})


def _with_absolute_canaries(sources: Any) -> Any:
    return tuple(map(_with_own_canaries, sources)) if isinstance(sources, tuple) else sources


def _with_own_canaries(source: EvalSource) -> EvalSource:
    document = {"reward": deepcopy(source.reward)}
    for _, canaries, key in canary_files(document):
        canaries[key] = str(Path(canaries[key]).expanduser().absolute())
    return source.model_copy(update=document)


def source_rewards(data: Document) -> dict[str, Any]:
    """The rewards of sources that have their own, by the source's name."""
    found: dict[str, Any] = {}
    for name in ("train", "eval"):
        for source in _sources(data, name) or ():
            if (reward := reward_of(source.get("path"), source.get("reward"))) is not None:
                found[str(source.get("name"))] = {"model": reward} if isinstance(reward, str) else reward
    return found


def run_reward(config: Document) -> Any:
    """The run's reward, which tasks that are its training rows bring with them."""
    data = config.get("data")
    return reward_of(data.get("train") if isinstance(data, dict) else None, config.get("reward", {}))


def _is_file(rows: Any) -> bool:
    return rows is not None and not is_source(rows)


def _sources(data: Document, name: str) -> list[Document] | None:
    """The sources of a list; None if it is no list."""
    stated = data.get(name)
    stated = [stated] if isinstance(stated, dict) and not is_source(stated) else stated
    return [each for each in stated if isinstance(each, dict)] if isinstance(stated, list | tuple) else None
