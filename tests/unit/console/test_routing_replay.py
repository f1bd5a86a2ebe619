"""What cannot replay routes is refused before anything starts, by field, value and fix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from console.config.config import parse_run_config
from console.run.model_check import routing_problem
from penstock.config import ConfigError
from services.generator.config import GeneratorConfig

WIDE = {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}


def document(path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    algorithm = {"routing_replay": True} | sections.pop("algorithm", {})
    sections = {"generator": {"engine": "vllm"}} | sections
    return {"model": {"path": str(path)}, "data": {"train": "t"}, "algorithm": algorithm, **sections}


def test_an_engine_that_records_no_routes_is_refused(tmp_path: Path) -> None:
    words = "engine emulated cannot record routes; choose vllm, transformers, or set it to false"
    with pytest.raises(ConfigError, match=f"algorithm.routing_replay: {words}"):
        parse_run_config(document(tmp_path, generator={"engine": "emulated"}), source="c.yaml")
    with pytest.raises(ConfigError, match="an engine of pipeline_parallel 2 cannot record routes; leave that 1"):
        parse_run_config(document(tmp_path, generator={"engine": "vllm", "pipeline_parallel": 2}), source="c.yaml")
    settings = {"run_id": "r", "model_path": tmp_path, "cache_dir": tmp_path, "records_routes": True}
    with pytest.raises(ValidationError, match=f"records_routes: {words}"):
        GeneratorConfig.model_validate(settings | {"engine": {"engine": "emulated"}})


@pytest.mark.parametrize(
    ("model", "sections", "words"),
    [
        (WIDE, {}, None),
        ({"model_type": "qwen3"}, {}, "of type 'qwen3' has no routers"),
        (
            WIDE,
            {"data": {"train": "t", "max_prompt_tokens": 30_000}},
            "data.max_prompt_tokens: 30000; at most 21845 with",
        ),
        (
            WIDE,
            {"algorithm": {"group_size": 512}},
            "at most 1490 with algorithm.routing_replay, whose routes take 384 bytes",
        ),
    ],
)
def test_a_model_is_checked_by_its_configuration(
    model: dict[str, Any], sections: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    made = {"data": {"train": "t", "max_prompt_tokens": 1_500}, "sampling": {"max_new_tokens": 512}} | sections
    problem = routing_problem(parse_run_config(document(tmp_path, **made), source="c.yaml"))
    assert problem is None if words is None else words in (problem or "")
