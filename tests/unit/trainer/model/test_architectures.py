"""Which architectures packed rows train exactly, and that docs/training.md says the same."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from services.trainer.batches.packing import Trajectory, join
from services.trainer.model.attention import packed_inputs, register_packed_attention
from services.trainer.model.backend import UnsupportedModelError
from services.trainer.model.model_loading import ModelSettings, load_trained
from services.trainer.model.ranks import Ranks
from services.trainer.model.token_logprobs import TokenLogprobs
from services.trainer.run_sections import LoraSection
from tests.helpers.models.model_families import FAMILIES, VOCAB_SIZE, save_tiny

CPU = torch.device("cpu")
READ_EACH_OTHER = "samples in one row read each other"
OWN_CODE = "its attention is not transformers' common one"
REFUSED = {
    "gemma2": "softcap",
    "granitemoehybrid": READ_EACH_OTHER,
    "qwen3_next": READ_EACH_OTHER,
    "falcon_h1": READ_EACH_OTHER,
    "jamba": READ_EACH_OTHER,
    "nemotron_h": READ_EACH_OTHER,
    "lfm2": READ_EACH_OTHER,
    "olmo_hybrid": READ_EACH_OTHER,
    "minimax": READ_EACH_OTHER,
    "mamba2": READ_EACH_OTHER,
    "glm_moe_dsa": "more than causal, windowed or chunked",
    "stablelm": "does not hand segment_lengths",
    "bloom": OWN_CODE,
    "gptj": "its attention cannot be replaced",
}
"""And what the refusal says; all other families are exact."""
EXACT = sorted(FAMILIES.keys() - REFUSED.keys())
LENGTHS = (21, 9, 40)
"""Two of them longer than any window or chunk, and the middle one reads neither neighbour."""
DOCUMENT = Path(__file__).parents[4] / "docs" / "training.md"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    register_packed_attention()


def load(directory: Path, **changes):
    return load_trained(ModelSettings(path=directory, dtype="float32", device="cpu", **changes), CPU, Ranks()).network


def samples() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    return [
        Trajectory(
            token_ids=rng.integers(3, VOCAB_SIZE, length).astype(np.int32),
            loss_mask=np.arange(length) > 0,
            behavior_logprobs=np.zeros(length, np.float32),
            advantages=np.zeros(length, np.float32),
        )
        for length in LENGTHS
    ]


def packed_logprobs(model) -> torch.Tensor:
    """As the trainer computes them, eight positions at a time."""
    pack = join(samples(), [0, 1, 2])
    inputs = packed_inputs(pack, CPU)
    return TokenLogprobs(model, inputs=inputs, logits_bytes=8 * 4 * VOCAB_SIZE).of(
        model,
        inputs,
        positions_n=torch.from_numpy(pack.logit_positions),
        targets_n=torch.from_numpy(pack.target_ids),
    )


def own_logprobs(model) -> torch.Tensor:
    """Each sample alone, by the attention and the mask that the model comes with."""
    found = []
    for sample in samples():
        token_ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("family", EXACT)
def test_packed_log_probs_and_gradients_are_those_of_the_models_own_attention(tmp_path, family):
    save_tiny(family, tmp_path)
    packed = load(tmp_path)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    found, expected = packed_logprobs(packed), own_logprobs(own)
    assert float((found - expected).detach().abs().max()) < 1e-4
    for logprobs in (found, expected):
        logprobs.sum().backward()
    gradients = dict(own.named_parameters())
    for name, parameter in packed.named_parameters():
        if parameter.grad is None:
            continue
        wanted = gradients[name].grad
        assert float((parameter.grad - wanted).norm()) <= 1e-3 * float(wanted.norm()) + 1e-5, name


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_what_packed_rows_would_train_as_something_else_is_refused_by_name(tmp_path, family):
    save_tiny(family, tmp_path)
    with pytest.raises(UnsupportedModelError, match=re.escape(REFUSED[family])):
        load(tmp_path)


@pytest.mark.parametrize("family", ["falcon_h1", "jamba", "qwen3_next"])
def test_a_leak_is_found_however_small_it_is(tmp_path, family):
    save_tiny(family, tmp_path, initializer_range=0.002)
    with pytest.raises(UnsupportedModelError, match=READ_EACH_OTHER):
        load(tmp_path)


def test_rotary_embeddings_that_follow_the_longest_sample_of_a_row_are_refused(tmp_path):
    rope = {
        "rope_type": "longrope",
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
    }
    long = {"rope_parameters": rope, "max_position_embeddings": 128, "original_max_position_embeddings": 64}
    with pytest.raises(UnsupportedModelError, match=r"longrope.*config.json.*\(64\)"):
        load(save_tiny("phi3", tmp_path / "long", **long))
    load(save_tiny("phi3", tmp_path / "short", **{**long, "max_position_embeddings": 64}))


def test_a_window_of_some_layers_only_is_exact(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    packed = load(save_tiny("qwen2", tmp_path, **windows))
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32", attn_implementation="eager").eval()
    assert set(packed.config.layer_types) == {"sliding_attention", "full_attention"}
    assert float((packed_logprobs(packed) - own_logprobs(own)).detach().abs().max()) < 1e-4


def test_checking_leaves_the_model_as_it_was(tmp_path):
    model = load(save_tiny("gpt_oss", tmp_path))
    assert model.config.sliding_window == 8
    assert model.config._attn_implementation == "penstock_packed"
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("family", ["gpt_oss", "llama4_text", "qwen3"])
def test_weights_in_sixteen_bits_below_an_adapter_pass_too(tmp_path, family):
    save_tiny(family, tmp_path)
    settings = ModelSettings(
        path=tmp_path, dtype="bfloat16", device="cpu", lora=LoraSection(target_modules=("q_proj", "v_proj"))
    )
    load_trained(settings, CPU, Ranks())


def test_the_document_tells_of_every_family_what_becomes_of_it():
    rows = re.findall(r"^\| (`[^|]+`) \| (exact|refused) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: verdict for names, verdict in rows for name in re.findall(r"`([^`]+)`", names)}
    assert told == {name: "refused" if name in REFUSED else "exact" for name in FAMILIES}
