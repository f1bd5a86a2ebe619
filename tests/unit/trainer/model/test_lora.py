"""A LoRA adapter in the backend: only it is trained, saved and handed out; dropout, reference, resume, other bases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from penstock.model.adapter_layout import NAME_PREFIX, model_digest
from services.trainer.batches.packing import pack_trajectories
from services.trainer.model.adapters.injection import Injection
from services.trainer.model.attention import register_packed_attention
from services.trainer.model.backend import CheckpointMismatchError, UnsupportedModelError
from services.trainer.model.ranks import Ranks
from services.trainer.model.weight_loading import load_weights
from services.trainer.run_sections import LoraSection
from tests.helpers.models.model_families import save_tiny, tiny_config
from tests.helpers.tensor_memory import TensorMemory
from tests.helpers.trainers.lone_rank import one_of
from tests.unit.trainer.builders import save_tiny_qwen2, scores_of
from tests.unit.trainer.distributed.test_rank_backend import (
    assert_equal_tensors,
    build_backend,
    clone,
    loss_with,
    naive_logprobs,
    random_trajectories,
    train,
)

LORA = LoraSection(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def logprobs(backend, trajectories):
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=10_000)
    return scores_of(backend, pack)


def test_an_untrained_adapter_changes_nothing_and_a_trained_one_only_its_own_tensors(model_directory):
    backend = build_backend(model_directory, lora=LORA)
    (trajectory,) = random_trajectories(count=1)
    np.testing.assert_allclose(logprobs(backend, [trajectory]), naive_logprobs(model_directory, trajectory), atol=1e-5)
    before = clone(backend._model.state_dict())
    train(backend, random_trajectories())
    train(backend, random_trajectories(seed=1))
    changed = {name for name, tensor in backend._model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    assert {f"{NAME_PREFIX}{name}".replace(".default.", ".") for name in changed} == backend.state_tensors().keys()


def test_what_is_handed_out_is_what_plain_peft_computes_with(model_directory, tmp_path):
    backend = build_backend(model_directory, lora=LORA)
    train(backend, random_trajectories())
    train(backend, random_trajectories(seed=1))
    backend.save(tmp_path).result()
    base = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32, attn_implementation="eager")
    plain = PeftModel.from_pretrained(base, tmp_path).eval()
    (trajectory,) = random_trajectories(seed=2, count=1)
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        rows = torch.log_softmax(plain(input_ids=ids[None]).logits[0], -1)[:-1]
    expected = rows.gather(1, ids[1:, None])[:, 0][torch.from_numpy(trajectory.loss_mask[1:])].numpy()
    np.testing.assert_allclose(logprobs(backend, [trajectory]), expected, atol=1e-5)
    assert np.abs(expected - naive_logprobs(model_directory, trajectory)).max() > 1e-3, "nothing was trained"
    assert backend.adapter.base_digest == model_digest(model_directory)


def test_a_resumed_adapter_goes_on_bit_for_bit_with_dropout(model_directory, tmp_path):
    lora = LORA.model_copy(update={"dropout": 0.3})
    original = build_backend(model_directory, lora=lora)
    train(original, random_trajectories())
    original.save(tmp_path).result()
    resumed = build_backend(model_directory, lora=lora)
    resumed.load(tmp_path)
    for backend in (resumed, original):
        # The random state belongs to the process.
        backend.load(tmp_path)
        train(backend, random_trajectories(seed=1))
    assert_equal_tensors(resumed.state_tensors(), original.state_tensors())


def test_dropout_is_on_while_gradients_are_computed_and_nowhere_else(model_directory):
    seen = []

    def remember(inputs):
        seen.append(inputs.trainer_logprobs.detach().numpy().copy())
        raise InterruptedError

    backend = build_backend(model_directory, lora=LORA.model_copy(update={"dropout": 0.5}), loss=remember)
    with torch.no_grad():
        for name, parameter in backend._model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2)
    (pack,) = pack_trajectories(random_trajectories(), max_pack_tokens=10_000)
    with pytest.raises(InterruptedError):
        backend.forward_backward(pack)
    calm = scores_of(backend, pack)
    assert np.array_equal(calm, scores_of(backend, pack))
    assert np.abs(seen[0] - calm).max() > 1e-3


def test_the_reference_is_the_base(model_directory):
    seen = []

    def remember(inputs):
        seen.append(inputs.reference_logprobs.numpy().copy())
        raise InterruptedError

    backend = build_backend(
        model_directory, lora=LORA, keep_reference=True, loss_settings=loss_with(kl_coefficient=0.1)
    )
    train(backend, random_trajectories())
    backend._loss = remember
    (trajectory,) = random_trajectories(count=1)
    (pack,) = pack_trajectories([trajectory], max_pack_tokens=10_000)
    with pytest.raises(InterruptedError):
        backend.forward_backward(pack)
    np.testing.assert_allclose(seen[0], naive_logprobs(model_directory, trajectory), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_reads_its_part_of_the_base_and_draws_its_part_of_the_adapter(tmp_path, rank, dtype):
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3", vocab_size=4096)).bfloat16()
    model.save_pretrained(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).state_dict()
    torch.manual_seed(0)
    drawn = loaded(tmp_path, Ranks(), dtype).state_dict()
    memory = TensorMemory(())
    with one_of(rank, 2) as ranks, memory.counting():
        found = loaded(tmp_path, ranks, dtype)
        parts = {name: parameter.to_local() for name, parameter in found.named_parameters()}
    for name, part in parts.items():
        expected = drawn[name] if ".lora_" in name else whole[name.replace(".base_layer", "")]
        assert torch.equal(part, expected.chunk(2)[rank]), name
    held = sum(part.nbytes for part in parts.values())
    assert held == sum(part.untyped_storage().nbytes() for part in parts.values())
    # While it reads, there is one more tensor at most; in the type of the file, the file is mapped into memory as well.
    sizes = [each.nbytes for each in whole.values()]
    assert held <= memory.peak_bytes < 1.1 * held + (sum(sizes) if dtype == torch.bfloat16 else max(sizes))


def loaded(path, ranks, dtype):
    register_packed_attention()
    injection = Injection(LORA, ranks, torch.device("cpu"))
    model = load_weights(
        path, dtype=dtype, computing=dtype, device=torch.device("cpu"), ranks=ranks, sharded=injection.around
    )
    injection.fill()
    return model


def test_an_adapter_of_another_base_or_a_whole_model_is_not_resumed(model_directory, tmp_path):
    backend = build_backend(model_directory, lora=LORA)
    backend.save(tmp_path).result()
    other = save_tiny_qwen2(tmp_path / "other", seed=5)
    before = clone(build_backend(other, lora=LORA).state_tensors())
    with pytest.raises(CheckpointMismatchError) as refusal:
        (stranger := build_backend(other, lora=LORA)).load(tmp_path)
    assert model_digest(model_directory) in str(refusal.value)
    assert model_digest(other) in str(refusal.value)
    assert_equal_tensors(stranger.state_tensors(), before)
    (tmp_path / "whole").mkdir()
    build_backend(model_directory).save(tmp_path / "whole").result()
    with pytest.raises(CheckpointMismatchError):
        backend.load(tmp_path / "whole")


def test_layers_that_are_not_there_are_named(model_directory):
    with pytest.raises(UnsupportedModelError, match="nowhere_proj"):
        build_backend(model_directory, lora=LoraSection(target_modules=("nowhere_proj",)))


def test_adapters_of_experts_which_no_engine_takes_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="q_proj, down_proj of qwen3_moe would adapt its experts"):
        build_backend(save_tiny("qwen3_moe", tmp_path), lora=LoraSection(target_modules=("q_proj", "down_proj")))


def test_activations_that_are_computed_again_are_dropped_out_alike(model_directory):
    lora = LORA.model_copy(update={"dropout": 0.5})
    kept, recomputed = (
        build_backend(model_directory, lora=lora, gradient_checkpointing=again) for again in (False, True)
    )
    (pack,) = pack_trajectories(random_trajectories(), max_pack_tokens=10_000)
    found = []
    for backend in (kept, recomputed):
        torch.manual_seed(1)
        backend.forward_backward(pack)
        found.append({name: each.grad for name, each in backend._model.named_parameters() if each.requires_grad})
    assert any(gradient.abs().max() > 0 for gradient in found[0].values())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)
