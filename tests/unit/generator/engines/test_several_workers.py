"""A model spread over workers: the settings, and how its weights are proved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import ConfigError, validate
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import Engine
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine


def config(model_path: Path, **engine: object) -> GeneratorConfig:
    document = {"run_id": "r", "model_path": str(model_path), "cache_dir": "c", "engine": engine}
    return validate(GeneratorConfig, document, source="c.yaml")


def build_engine(model_path: Path, **engine: object) -> Engine:
    made = config(model_path, engine="vllm", **engine)
    return made.engine.build(made)


def test_stages_reach_vllm_and_no_other_engine_takes_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4}))
    engine = build_engine(tmp_path, tensor_parallel=2, pipeline_parallel=4)
    assert isinstance(engine, VllmEngine)
    assert (engine._config.tensor_parallel, engine._config.pipeline_parallel) == (2, 4)
    with pytest.raises(ValueError, match="5 stages for 4 layers"):
        build_engine(tmp_path, pipeline_parallel=5)
    for direction in ("tensor_parallel", "pipeline_parallel"):
        with pytest.raises(ConfigError, match=f"{direction}: 2 .* need the vllm engine, not transformers"):
            config(tmp_path, engine="transformers", **{direction: 2})


@pytest.mark.parametrize(
    ("heads", "key_heads", "degree", "message"),
    [
        (16, 8, 16, None),
        (16, 2, 4, None),
        (16, 8, 3, "engine.tensor_parallel: 3 does not divide 16 attention heads"),
        (24, 4, 6, "engine.tensor_parallel: 6 neither divides 4 key-value heads nor they it"),
    ],
)
def test_a_degree_that_does_not_fit_the_heads_is_refused_before_vllm_starts(
    tmp_path: Path, heads: int, key_heads: int, degree: int, message: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": key_heads}))
    if message is None:
        build_engine(tmp_path, tensor_parallel=degree)
        return
    with pytest.raises(ValueError, match=f"^{message}$"):
        build_engine(tmp_path, tensor_parallel=degree)


@pytest.mark.parametrize(
    ("stages", "differing"),
    [
        ([{"differing": [], "equal": ["a"]}, {"differing": [], "equal": ["b", "c"]}], []),
        ([{"differing": [], "equal": ["a"]}, {"differing": [], "equal": ["b"]}], ["c"]),
        ([{"differing": [], "equal": ["a", "b"]}, {"differing": ["a"], "equal": ["c"]}], ["a"]),
    ],
    ids=["each holds its part", "nobody holds c", "both hold a, one another"],
)
async def test_stages_prove_together_what_they_hold(
    tmp_path: Path, stages: list[dict[str, list[str]]], differing: list[str]
) -> None:
    async def collective_rpc(method: str, args: tuple[list[str]]) -> list[dict[str, list[str]]]:
        assert (method, args) == ("penstock_attest", (["w.safetensors"],))
        return stages

    engine = VllmEngine(VllmEngineConfig(), ServedModel(model_path=tmp_path))
    engine._llm = SimpleNamespace(collective_rpc=collective_rpc)
    assert await engine._attest([Path("w.safetensors")], ["a", "b", "c"]) == differing
