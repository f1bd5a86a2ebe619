"""An adapter over a base in 4 bits: the numbers of the layers, what is held and read, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from transformers import AutoModelForCausalLM

from penstock.model import digests
from services.trainer.model.adapters import nf4
from services.trainer.model.adapters.injection import Injection
from services.trainer.model.adapters.nf4 import Nf4Linear, pack, unpack
from services.trainer.model.attention import register_packed_attention
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.ranks import Ranks
from services.trainer.model.weight_loading import load_weights
from services.trainer.run_sections import LoraSection
from tests.helpers.models.model_families import save_tiny, tiny_config
from tests.helpers.tensor_memory import TensorMemory
from tests.helpers.trainers.lone_rank import one_of
from tests.helpers.trainers.two_processes import assert_close
from tests.unit.trainer.distributed.test_rank_backend import (
    build_backend,
    clone,
    random_trajectories,
    train,
)
from tests.unit.trainer.model.test_lora import logprobs

CPU = torch.device("cpu")
LORA = LoraSection(rank=4, base="nf4", target_modules=("q_proj", "down_proj"))
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "attention_bias": True}


def test_rows_are_packed_each_by_itself_and_as_exactly_as_by_bitsandbytes():
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(600, 1024)
    packed = pack(weight)
    assert 8 * packed.nbytes / weight.numel() < 4.2
    assert torch.equal(pack(weight[250:260]), packed[250:260])
    theirs = dequantize_4bit(*quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4"))
    errors = [float((found - weight).abs().mean()) for found in (unpack(packed, 1024, dtype=torch.float32), theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
    assert torch.equal(unpack(pack(torch.zeros(2, 64)), 64, dtype=torch.float32), torch.zeros(2, 64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_packs_and_unpacks_as_a_cpu_does(dtype):
    torch.manual_seed(0)
    weight = (0.02 * torch.randn(64, 512)).to(dtype)
    packed = pack(weight.cuda())
    found, expected = (unpack(each, 512, dtype=torch.float32).cpu() for each in (packed, pack(weight)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_it_trains_as_on_a_base_of_the_rounded_weights(tmp_path):
    """Log-probs, two steps, and no gradient or change of the base."""
    exact = save_tiny("qwen3", tmp_path / "exact", **WIDE)
    model = AutoModelForCausalLM.from_pretrained(exact)
    for name, layer in model.named_modules():
        if type(layer) is torch.nn.Linear and name != "lm_head":
            layer.weight.data = unpack(pack(layer.weight.data), layer.in_features, dtype=torch.float32)
    model.save_pretrained(tmp_path / "rounded")
    found = build_backend(exact, lora=LORA)
    expected = build_backend(tmp_path / "rounded", lora=LORA.model_copy(update={"base": "auto"}))
    assert sum(isinstance(layer, Nf4Linear) for layer in found._model.modules()) == 14
    before = clone({name: each for name, each in found._model.named_parameters() if not each.requires_grad})
    (trajectory,) = random_trajectories(count=1)
    for seed in (0, 1):
        torch.testing.assert_close(*(torch.tensor(logprobs(each, [trajectory])) for each in (found, expected)))
        steps = [train(each, random_trajectories(seed=seed)) for each in (found, expected)]
        assert steps[0].grad_norm == pytest.approx(steps[1].grad_norm, rel=1e-5)
    assert_close(found.state_tensors(), expected.state_tensors())
    after = dict(found._model.named_parameters())
    assert all(torch.equal(after[name], tensor) and after[name].grad is None for name, tensor in before.items())


def loaded(path, ranks, *, dtype=torch.float32):
    register_packed_attention()
    injection = Injection(LORA, ranks, CPU)
    settings = {"dtype": dtype, "computing": dtype, "device": CPU, "ranks": ranks}
    model = load_weights(path, sharded=injection.around, **settings)
    injection.fill()
    return model


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_reads_its_rows_and_packs_each_layer_as_it_is_read(tmp_path, rank):
    save_tiny("qwen3", tmp_path, **WIDE, num_hidden_layers=8)
    torch.manual_seed(0)
    whole = dict(loaded(tmp_path, Ranks()).named_parameters())
    memory = TensorMemory(())
    with one_of(rank, 2) as ranks, memory.counting():
        parts = {name: each.to_local() for name, each in loaded(tmp_path, ranks).named_parameters()}
    assert parts.keys() == whole.keys()
    for name, part in parts.items():
        assert torch.equal(part, whole[name].chunk(2)[rank]), name
    held = sum(part.nbytes for part in parts.values())
    # A layer's rows in float32 and what packs them, but not those of several.
    assert held <= memory.peak_bytes < held + 12 * 64 * 128 * 4


def test_one_process_packs_each_layer_as_it_is_read_too(tmp_path, monkeypatch):
    save_tiny("qwen3", tmp_path, **WIDE)
    had_memory = []

    class Noted(Nf4Linear):
        def __init__(self, layer, device):
            had_memory.append(not layer.weight.is_meta)
            super().__init__(layer, device)

    monkeypatch.setattr(nf4, "Nf4Linear", Noted)
    packed = dict(loaded(tmp_path, Ranks()).named_parameters())
    # When the base's layers were replaced.
    assert had_memory == [False] * 14
    (weight,) = (
        each.detach()
        for name, each in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters()
        if name == "model.layers.1.mlp.up_proj.weight"
    )
    assert torch.equal(packed["model.layers.1.mlp.up_proj.packed"], pack(weight))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not say what is resident of a file")
def test_one_process_never_has_the_whole_file_in_memory(tmp_path, monkeypatch):
    """Neither as it packs the file's layers nor as it digests them: pages that are mapped count, too."""
    found = []

    def packed_at_once(rows):
        rows.view(torch.int16).sum()
        found.append(resident_bytes(tmp_path / "model.safetensors"))
        return torch.zeros(len(rows), rows.shape[1] // 2 + rows.shape[1] // 64 + 8, dtype=torch.uint8)

    # So many weights take seconds; with fewer, the kernel maps the whole file at the first touch.
    monkeypatch.setattr(nf4, "pack", packed_at_once)
    config = tiny_config("qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=3, head_dim=64)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    num_bytes = (tmp_path / "model.safetensors").stat().st_size
    loaded(tmp_path, Ranks(), dtype=torch.bfloat16)
    assert len(found) == 21
    assert 1024 * 3072 * 2 <= max(found) < 0.5 * num_bytes
    noting = SimpleNamespace(update=lambda _: found.append(resident_bytes(tmp_path / "model.safetensors")))
    found.clear()
    monkeypatch.setattr(digests, "new_hasher", lambda _: noting)
    noting.hexdigest = lambda: "00"
    Ranks().model_digest(tmp_path)
    assert len(found) > 21
    assert max(found) < 0.5 * num_bytes


def resident_bytes(file):
    """Of a file that this process maps, what is in its memory."""
    mappings = Path("/proc/self/smaps").read_text(encoding="utf-8").split("VmFlags")
    mine = [each for each in mappings if str(file) in each]
    return sum(1024 * int(each.partition("\nRss:")[2].split()[0]) for each in mine)


def test_layers_that_have_no_whole_blocks_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"lora.base: nf4 packs blocks of 64 weights, and .* has 32 inputs"):
        build_backend(save_tiny("qwen3", tmp_path), lora=LORA)
