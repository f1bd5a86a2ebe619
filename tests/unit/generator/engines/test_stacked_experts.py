"""Experts by their own names, whether a file stacks them or not."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from services.generator.engine.stacked_experts import expert_parts, split_shapes


def test_both_forms_have_one_layout():
    stacked = {"m.experts.gate_up_proj": (2, 6, 4), "m.experts.down_proj": (2, 4, 3), "m.gate.weight": (2, 4)}
    alone = {
        f"m.experts.{expert}.{part}.weight": shape
        for expert in range(2)
        for part, shape in (("gate_proj", (3, 4)), ("up_proj", (3, 4)), ("down_proj", (4, 3)))
    }
    assert split_shapes(stacked) == split_shapes(alone | {"m.gate.weight": (2, 4)})
    assert split_shapes(alone) == alone


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("m.mlp.gate_up_proj", (2, 6, 4)),
        ("m.experts.gate_up_proj", (6, 4)),
        ("m.experts.gate_up_proj", (2, 5, 4)),
        ("m.experts.gate_up_proj_bias", (2, 6, 4)),
    ],
)
def test_what_is_no_stack_of_experts_stays_whole(name: str, shape: tuple[int, ...]):
    assert not tuple(expert_parts(name, shape))
    assert split_shapes({name: shape}) == {name: shape}


def test_a_file_of_either_form_is_read_expert_by_expert(tmp_path):
    checkpoint_files = pytest.importorskip("services.generator.engines.vllm.worker.checkpoint_files")
    gate_up, down = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    save_file({"m.experts.gate_up_proj": gate_up, "m.experts.down_proj": down}, tmp_path / "stacked.safetensors")
    with checkpoint_files.open_checkpoint([str(tmp_path / "stacked.safetensors")]) as stored:
        assert torch.equal(stored["m.experts.1.gate_proj.weight"].read(), gate_up[1, :3])
        assert torch.equal(stored["m.experts.1.up_proj.weight"].read(), gate_up[1, 3:])
        assert torch.equal(stored["m.experts.0.down_proj.weight"].read(), down[0])
        some = set(stored) - {"m.experts.1.up_proj.weight"}
        assert checkpoint_files.complete_origins(some, stored) == {"m.experts.down_proj"}
        assert checkpoint_files.complete_origins(set(stored), stored) == {
            "m.experts.down_proj",
            "m.experts.gate_up_proj",
        }
        assert checkpoint_files.origins_of({"m.experts.1.up_proj.weight", "other"}, stored) == {
            "m.experts.gate_up_proj",
            "other",
        }
