"""Weights that are not those of config.json are refused in one line, not drawn at random, and no engine starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.config import ConfigError
from penstock.security import NO_SECURITY
from services.generator import server
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import UnusableModelError
from services.generator.engine.model_fit import check_fit
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.transformers.transformers_engine import TransformersEngine
from tests.helpers.models.model_families import FAMILIES, save_tiny
from tests.helpers.models.tiny_model import make_tiny_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def lose(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def reshape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = torch.zeros(3, 3)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def of_another_size(folder: Path) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"intermediate_size": 2 * config["intermediate_size"]}))


def config_of(folder: Path, engine: str) -> GeneratorConfig:
    settings = {"run_id": "r", "broker": "127.0.0.1:1", "weights": "127.0.0.1:1", "listen": "127.0.0.1:0"}
    settings |= {"model_path": str(folder), "cache_dir": str(folder.parent / "cache")}
    return GeneratorConfig.model_validate({**settings, "engine": {"engine": engine}})


SPOILT = pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lose, f"{NAME} is missing; copy both"),
        (reshape, f"{NAME} has another shape; copy both"),
        (of_another_size, "has another shape, and 5 more such tensors"),
    ],
)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_that_fit_pass(family: str, tmp_path: Path) -> None:
    check_fit(save_tiny(family, tmp_path))


@SPOILT
def test_what_does_not_fit_is_named(folder: Path, spoil: Callable[[Path], None], told: str) -> None:
    check_fit(folder)
    spoil(folder)
    with pytest.raises(UnusableModelError, match=told) as caught:
        check_fit(folder)
    assert "\n" not in str(caught.value)


@SPOILT
async def test_the_transformers_engine_refuses_it(folder: Path, spoil: Callable[[Path], None], told: str) -> None:
    spoil(folder)
    config = config_of(folder, "transformers")
    assert isinstance(config.engine, TransformersEngineConfig)
    with pytest.raises(UnusableModelError, match=told):
        await TransformersEngine(config.engine, config).start()


def member_of(folder: Path, engine: str) -> Any:
    return server._assemble(config_of(folder, engine), mock.Mock(), NO_SECURITY)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_generator_whose_weights_are_cut_short_ends_with_one_line(folder: Path, engine: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors: .*cut short, copy it again") as caught:
        member_of(folder, engine)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
async def test_a_generator_whose_model_does_not_fit_ends_with_one_line(folder: Path, engine: str) -> None:
    lose(folder)
    with pytest.raises(ConfigError, match=r"model_path: .*is missing; copy both from the same model"):
        await member_of(folder, engine)._run_engine()
