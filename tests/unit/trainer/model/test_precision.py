"""Computing in bfloat16: what is trained stays float32, what is published and exported does not."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.trainer.batches.packing import pack_trajectories
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.precision import compute_dtype
from tests.unit.trainer.builders import build_trajectory, save_tiny_qwen2, scores_of
from tests.unit.trainer.distributed.test_rank_backend import build_backend
from tests.unit.trainer.model.test_lora import LORA

RATE = 1e-5
"""AdamW's first steps move each weight by about so much, which bfloat16 does not hold beside weights of 0.1."""


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def only_pack(seed):
    rng = np.random.default_rng(seed)
    trajectories = [build_trajectory(rng, num_prompt=3, num_completion=8) for _ in range(4)]
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=1000)
    return pack


def step(backend: RankBackend, seed: int) -> None:
    pack = only_pack(seed)
    backend.forward_backward(pack)
    backend.optimizer_step(divisor=pack.num_loss_tokens)


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_trained_is_float32_and_small_updates_add_up(model_directory, lora):
    backend = build_backend(
        model_directory, dtype="bfloat16", optimizer={"learning_rate": RATE}, **({"lora": LORA} if lora else {})
    )
    before = {name: parameter.detach().clone() for name, parameter in backend._learner.parameters.items()}
    for seed in range(4):
        step(backend, seed)
    for name, parameter in backend._learner.parameters.items():
        assert parameter.dtype == backend._learner.optimizer.state[parameter]["exp_avg"].dtype == torch.float32
        moved = (parameter.detach() - before[name]).abs()
        assert 0 < moved.max() < 100 * RATE, name


def test_log_probs_are_those_of_bfloat16_products(model_directory):
    exact, rounded = (
        scores_of(build_backend(model_directory, dtype=dtype), only_pack(0)) for dtype in ("float32", "bfloat16")
    )
    assert rounded.dtype == np.float32
    assert 0 < np.abs(exact - rounded).max() < 0.1


ON_A_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_losses_and_gradients_are_close_to_those_of_float32(model_directory, device):
    exact, rounded = (build_backend(model_directory, dtype=dtype, device=device) for dtype in ("float32", "bfloat16"))
    pack = only_pack(0)
    losses = [backend.forward_backward(pack).means()["loss"] for backend in (exact, rounded)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.02)
    gradients = [torch.cat([p.grad.flatten() for p in each._learner.parameters.values()]) for each in (exact, rounded)]
    assert torch.nn.functional.cosine_similarity(*gradients, dim=0) > 0.99
    assert 0 < (gradients[0] - gradients[1]).norm() < 0.1 * gradients[0].norm()
    assert rounded._learner.optimizer.defaults["fused"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_a_step_in_bfloat16_is_close_to_that_of_float32_on_the_cpu(model_directory, device, record_property):
    exact, rounded = (
        build_backend(model_directory, dtype=dtype, device=place, optimizer={"learning_rate": RATE})
        for dtype, place in (("float32", "cpu"), ("bfloat16", device))
    )
    pack = only_pack(0)
    logprobs = [scores_of(backend, pack) for backend in (exact, rounded)]
    before = flat(exact, lambda parameter: parameter)
    losses = [backend.forward_backward(pack).means()["loss"] for backend in (exact, rounded)]
    gradients = [flat(backend, lambda parameter: parameter.grad) for backend in (exact, rounded)]
    norms = [backend.optimizer_step(divisor=pack.num_loss_tokens).grad_norm for backend in (exact, rounded)]
    moves = [flat(backend, lambda parameter: parameter) - before for backend in (exact, rounded)]
    nats = float(np.abs(logprobs[0] - logprobs[1]).max())
    of_gradients, of_moves = (float(torch.nn.functional.cosine_similarity(*two, dim=0)) for two in (gradients, moves))
    record_property("log-probs differ by, nats", f"{nats:.4f}")
    record_property("cosine of gradients, of the weights' moves", f"{of_gradients:.4f}, {of_moves:.4f}")
    assert nats < 0.1
    assert losses[1] == pytest.approx(losses[0], rel=0.05, abs=0.02)
    assert norms[1] == pytest.approx(norms[0], rel=0.05)
    assert of_gradients > 0.99
    # AdamW's first step goes by the gradients' signs, which rounding turns where they are nearly 0.
    assert of_moves > 0.9


def flat(backend, value):
    """A value of every parameter as one vector on the CPU."""
    parameters = backend._learner.parameters.values()
    return torch.cat([value(parameter).detach().float().cpu().flatten() for parameter in parameters])


def test_what_is_published_and_exported_is_bfloat16_and_what_resumes_is_not(tmp_path, model_directory):
    backend = build_backend(model_directory, dtype="bfloat16", optimizer={"learning_rate": RATE})
    step(backend, 0)
    published = {name: tensor.clone() for name, tensor in backend.state_tensors().items()}
    assert {tensor.dtype for tensor in published.values()} == {torch.bfloat16}
    backend.save(tmp_path).result()
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    exported = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(exported[name], tensor) for name, tensor in published.items())
    resumed = build_backend(model_directory, dtype="bfloat16", optimizer={"learning_rate": RATE})
    resumed.load(tmp_path)
    for one in (backend, resumed):
        step(one, 1)
    for name, parameter in backend._learner.parameters.items():
        assert torch.equal(parameter, resumed._learner.parameters[name]), name


def test_auto_takes_16_bits_from_a_model_that_has_them_and_only_on_a_gpu(tmp_path, model_directory):
    AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.bfloat16).save_pretrained(tmp_path)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert compute_dtype("auto", path=tmp_path, device=gpu) == torch.bfloat16
    assert compute_dtype("auto", path=tmp_path, device=cpu) == torch.float32
    assert compute_dtype("auto", path=model_directory, device=gpu) == torch.float32
    assert compute_dtype("bfloat16", path=model_directory, device=cpu) == torch.bfloat16
