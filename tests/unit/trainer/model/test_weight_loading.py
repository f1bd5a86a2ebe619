"""Each process reads its own part of a model's files; files that do not fit the model are refused by name."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from services.trainer.model.attention import register_packed_attention
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.critic import _parts
from services.trainer.model.ranks import Ranks
from services.trainer.model.weight_loading import load_weights
from tests.helpers.models.model_families import FAMILIES, save_tiny, tiny_config
from tests.helpers.trainers.lone_rank import one_of
from tests.unit.trainer.model.test_architectures import REFUSED

CPU = torch.device("cpu")
HAVE_EXPERTS_APART = {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "minimax_m2", "glm4_moe", "deepseek_v3"}
"""In files; a process needs one of the four."""
UNTRAINABLE = REFUSED.keys() - {"falcon_h1", "olmo_hybrid"}
"""The two are of use here: falcon_h1 has buffers of its own, and conversions of olmo_hybrid cross rows."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, UP, EMBEDDING = "model.norm.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_packed_attention()


def load(path, ranks, **changes):
    return load_weights(
        path, **{"dtype": torch.float32, "computing": torch.float32, "device": CPU, "ranks": ranks, **changes}
    )


def assert_is_part(found, whole, *, rank, num_ranks):
    """Of every parameter the rows of that process, of every buffer all."""
    parameters = dict(whole.named_parameters())
    assert dict(found.named_parameters()).keys() == parameters.keys()
    for name, parameter in found.named_parameters():
        parts = parameters[name].chunk(num_ranks)
        mine = parts[rank] if rank < len(parts) else parameters[name][:0]
        assert torch.equal(parameter.to_local(), mine), name
    assert found.state_dict().keys() == whole.state_dict().keys()
    buffers = dict(whole.named_buffers())
    assert dict(found.named_buffers()).keys() == buffers.keys()
    for name, buffer in found.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - UNTRAINABLE))
@pytest.mark.slow
def test_a_process_reads_its_part_bit_for_bit(tmp_path, family):
    """The last one, whose part is the smallest."""
    whole = AutoModelForCausalLM.from_pretrained(save_tiny(family, tmp_path), dtype=torch.float32)
    num_ranks = 2 if family in HAVE_EXPERTS_APART else 3
    seen = []
    with one_of(num_ranks - 1, num_ranks) as ranks:
        found = load(tmp_path, ranks, sharded=lambda model: seen.append(model.device.type) or (model,))
        assert_is_part(found, whole, rank=num_ranks - 1, num_ranks=num_ranks)
    # Sharded while it was empty, except where a conversion needs whole tensors.
    assert seen == ["cpu" if family == "olmo_hybrid" else "meta"]


def test_experts_are_read_whole_where_a_process_has_none(tmp_path):
    whole = AutoModelForCausalLM.from_pretrained(save_tiny("qwen3_moe", tmp_path), dtype=torch.float32)
    with one_of(2, 3) as ranks:
        assert_is_part(load(tmp_path, ranks), whole, rank=2, num_ranks=3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_parts_of_several_files_are_converted_and_a_critic_reads_the_same(tmp_path, rank, tied):
    config = tiny_config("qwen3", tie_word_embeddings=tied, vocab_size=95)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()) > 2
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    seen = []
    with one_of(rank, 2) as ranks:
        found = load(tmp_path, ranks, sharded=lambda model: seen.append(len(list(model.parameters()))) or (model,))
        assert_is_part(found, whole, rank=rank, num_ranks=2)
        assert (found.lm_head.weight is found.get_input_embeddings().weight) is tied
        # Tied weights were one when they were sharded, too.
        assert seen == [len(list(whole.parameters()))]
        critic = load(tmp_path, ranks, sharded=_parts).base_model
        assert_is_part(critic, whole.base_model, rank=rank, num_ranks=2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_index_that_lies_is_refused_in_all_processes(tmp_path, num_ranks):
    AutoModelForCausalLM.from_config(tiny_config("qwen3")).save_pretrained(tmp_path, max_shard_size="20KB")
    path = tmp_path / INDEX
    index = json.loads(path.read_text(encoding="utf-8"))
    first, *_, last = sorted(index["weight_map"])
    index["weight_map"][first] = index["weight_map"][last]
    path.write_text(json.dumps(index), encoding="utf-8")
    with (
        pytest.raises(UnsupportedModelError, match=f"weight_map.{first}: .* does not hold it"),
        one_of(0, num_ranks) as ranks,
    ):
        load(tmp_path, ranks)


def without(weights, name):
    del weights[name]


def spoil_header(path):
    """It announces a gigabyte."""
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 2**30) + content[8:])


SPOILED = {
    "missing": (lambda weights: without(weights, NORM), f"{NORM} is missing"),
    "longer": (lambda weights: weights.update({NORM: torch.zeros(33)}), rf"{NORM} is not \[32\]"),
    "more than one": (lambda weights: (without(weights, NORM), without(weights, UP)), "is missing, and 1 more such"),
}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, num_ranks, spoil, message):
    file = save_tiny("llama", tmp_path) / WEIGHTS
    weights = load_file(file)
    spoil(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with (
        pytest.raises(UnsupportedModelError, match=f"{tmp_path}: .*config.json: .*{message}"),
        one_of(0, num_ranks) as ranks,
    ):
        load(tmp_path, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tensors_that_the_model_does_not_know_are_left_out_with_a_warning(tmp_path, num_ranks):
    file = save_tiny("llama", tmp_path) / WEIGHTS
    save_file(load_file(file) | {"mtp.bias": torch.zeros(3)}, file, metadata={"format": "pt"})
    with capture_logs() as logs, one_of(0, num_ranks) as ranks:
        found = load(tmp_path, ranks)
    assert "mtp.bias" not in found.state_dict()
    warnings = [log["first"] for log in logs if log["event"] == "tensors of no use to the model"]
    assert warnings == ["mtp.bias"]


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_weight_that_is_in_the_files_twice_must_be_the_same(tmp_path, is_equal):
    file = save_tiny("qwen3", tmp_path, tie_word_embeddings=True) / WEIGHTS
    weights = load_file(file)
    assert "lm_head.weight" not in weights
    save_file(weights | {"lm_head.weight": weights[EMBEDDING] + (not is_equal)}, file, metadata={"format": "pt"})
    if is_equal:
        found = load(tmp_path, Ranks())
        assert found.lm_head.weight is found.get_input_embeddings().weight
        return
    with pytest.raises(UnsupportedModelError, match=f"lm_head.weight differs from {EMBEDDING}"):
        load(tmp_path, Ranks())


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("spoil", [spoil_header, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_damaged_file_is_refused(tmp_path, num_ranks, spoil):
    spoil(save_tiny("llama", tmp_path) / WEIGHTS)
    with (
        pytest.raises(UnsupportedModelError, match=f"{tmp_path}: its weights cannot be read"),
        one_of(0, num_ranks) as ranks,
    ):
        load(tmp_path, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_pickled_weights_are_not_read(tmp_path, num_ranks):
    file = save_tiny("llama", tmp_path) / WEIGHTS
    torch.save(load_file(file), tmp_path / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}: holds no "), one_of(0, num_ranks) as ranks:
        load(tmp_path, ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_index_that_names_what_does_not_exist_is_an_error_that_names_it(tmp_path, num_ranks):
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UnsupportedModelError, match=f"{lost.name}.* is missing"), one_of(0, num_ranks) as ranks:
        load(tmp_path, ranks)
    index = json.loads((tmp_path / INDEX).read_text(encoding="utf-8"))
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != lost.name}
    (tmp_path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match=r"model\..* is missing"), one_of(0, num_ranks) as ranks:
        load(tmp_path, ranks)


def test_what_another_process_cannot_load_is_refused_here_too(tmp_path):
    class NotAgreeing(Ranks):
        def agree(self, is_so):
            assert is_so
            return False

    with pytest.raises(UnsupportedModelError, match=f"{tmp_path}: another process"):
        load(save_tiny("llama", tmp_path), NotAgreeing())
