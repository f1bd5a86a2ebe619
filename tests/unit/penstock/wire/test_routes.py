"""Routes on the wire: their form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import InvalidFieldError
from penstock.model.routers import NoRoutersError, read_routers
from penstock.v1 import types_pb2
from penstock.wire.routes import RoutingShape, num_route_rows, read_facts

SMALL = RoutingShape(num_layers=3, num_experts=200, experts_per_token=2)
LARGE = RoutingShape(num_layers=3, num_experts=300, experts_per_token=2)
QWEN3_30B = RoutingShape(num_layers=48, num_experts=128, experts_per_token=8)


@pytest.mark.parametrize(("shape", "num_bytes"), [(SMALL, 6), (LARGE, 12), (QWEN3_30B, 384)])
def test_a_row_takes_the_fewest_bytes_and_comes_back(shape: RoutingShape, num_bytes: int) -> None:
    rng = np.random.default_rng(0)
    size = (5, shape.num_layers, shape.experts_per_token)
    routes = rng.integers(0, shape.num_experts, size).astype(shape.dtype)
    routes[0, 0, 0] = shape.num_experts - 1
    data = routes.tobytes()
    assert len(data) == 5 * num_bytes == 5 * shape.row_bytes
    assert np.array_equal(shape.array(data, num_rows=5, field="routes"), routes)
    assert RoutingShape.from_proto(shape.to_proto(), "routing") == shape


@pytest.mark.parametrize(
    ("shape", "data", "message"),
    [
        (SMALL, b"\0" * 11, "routes: 11 bytes; 2 rows of 6 bytes are 12"),
        (SMALL, b"\0" * 18, "routes: 18 bytes; 2 rows"),
        (SMALL, b"\0" * 11 + b"\xc8", "routes: expert 200; ids are below 200"),
        (LARGE, b"\0" * 22 + (300).to_bytes(2, "little"), "routes: expert 300; ids are below 300"),
    ],
)
def test_what_is_no_route_of_the_model_is_refused_by_name(shape: RoutingShape, data: bytes, message: str) -> None:
    assert shape.fault(read_facts(data), 2).startswith(message)
    with pytest.raises(InvalidFieldError, match="trajectory"):
        shape.array(data, num_rows=2, field="trajectory.routes")


def test_only_the_first_tokens_bring_the_rows_of_the_prompt() -> None:
    assert num_route_rows(num_tokens=2, num_prompt_tokens=3) == 4
    assert num_route_rows(num_tokens=2, num_prompt_tokens=3, offset=1) == 2
    assert num_route_rows(num_tokens=0, num_prompt_tokens=3) == 0


@pytest.mark.parametrize(
    "changes",
    [{"num_layers": 0}, {"num_experts": 1}, {"experts_per_token": 9}, {"num_layers": 1024, "num_experts": 512}],
)
def test_an_impossible_form_is_refused(changes: dict[str, int]) -> None:
    values = {"num_layers": 4, "num_experts": 8, "experts_per_token": 2} | changes
    if changes.get("num_experts") == 512:
        values["experts_per_token"] = 128
    with pytest.raises(InvalidFieldError, match=r"limits\.routing"):
        RoutingShape.from_proto(types_pb2.RoutingShape(**values), "limits.routing")


CONFIG = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [({}, (0, 1, 2, 3)), ({"decoder_sparse_step": 2}, (1, 3)), ({"mlp_only_layers": [0, 3]}, (1, 2))],
)
def test_routers_are_found_by_the_configuration(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    routers = read_routers(tmp_path, field="algorithm.routing_replay")
    assert routers.layers == layers
    assert routers.shape == RoutingShape(num_layers=len(layers), num_experts=8, experts_per_token=2)
    # Of what an engine says of all layers, theirs are kept.
    whole = np.arange(8, dtype=np.int32).reshape(1, 4, 2)
    joined = routers.joined([whole, whole])
    assert (joined.dtype, joined[1].tolist()) == (np.uint8, [[2 * layer, 2 * layer + 1] for layer in layers])
    assert routers.joined([]).shape == (0, len(layers), 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen3"}, "of type 'qwen3' .*set algorithm.routing_replay to false"),
        ({"mlp_only_layers": [0, 1, 2, 3]}, "none of its layers .*set algorithm.routing_replay to false"),
        ({"num_local_experts": "8"}, "num_local_experts in config.json must be a positive integer, not '8'"),
    ],
)
def test_a_model_without_routers_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(NoRoutersError, match=f"^algorithm.routing_replay: .*{words}"):
        read_routers(tmp_path, field="algorithm.routing_replay")
