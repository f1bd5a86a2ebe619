"""A process' part of the backend, alone, on a tiny Qwen2: packed equals unpacked, safe failure, exact resume."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FalconMambaConfig, MambaConfig

from services.trainer.algorithms.base import Clip
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.loss import LossInputs, LossOutputs, LossSettings, policy_loss
from services.trainer.algorithms.terms.correction import Correction
from services.trainer.batches.packing import pack_trajectories
from services.trainer.checkpoints import tensor_copies
from services.trainer.distributed import rank_backend
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.backend import (
    CheckpointMismatchError,
    LossTotals,
    NonFiniteGradientError,
    NonFiniteLossError,
    UnsupportedModelError,
)
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from tests.helpers.models.model_families import save_tiny
from tests.unit.trainer.builders import build_trajectory, save_tiny_qwen2, scores_of


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def loss_with(**changes):
    return LossSettings(clip=Clip(low=0.2, high=0.2), **changes)


def build_backend(directory, *, loss=None, loss_settings=None, optimizer=None, ranks=None, **model):
    return RankBackend(
        model=ModelSettings(path=directory, **model),
        optimizer=OptimizerConfig(**({"learning_rate": 1e-2} | (optimizer or {}))),
        loss=loss or partial(policy_loss, algorithm=DAPO, settings=loss_settings or loss_with()),
        seed=0,
        ranks=ranks,
    )


def random_trajectories(seed=0, count=12):
    rng = np.random.default_rng(seed)
    return [
        build_trajectory(rng, num_prompt=int(rng.integers(1, 8)), num_completion=int(rng.integers(1, 24)))
        for _ in range(count)
    ]


def gradients(backend):
    return {name: parameter.grad.clone() for name, parameter in backend._model.named_parameters()}


def train(backend, trajectories, *, max_pack_tokens=64):
    for pack in pack_trajectories(trajectories, max_pack_tokens=max_pack_tokens):
        backend.forward_backward(pack)
    return backend.optimizer_step(divisor=sum(int(item.loss_mask.sum()) for item in trajectories))


def clone(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


def assert_equal_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def naive_logprobs(directory, trajectory):
    """One sequence, eager attention, float64, full logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    ids = torch.from_numpy(trajectory.token_ids.astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0] / trajectory.temperature
    logprobs = torch.log_softmax(logits, -1)[:-1].gather(1, ids[1:, None])[:, 0]
    return logprobs[torch.from_numpy(trajectory.loss_mask[1:])].numpy()


@pytest.mark.parametrize("temperatures", [[1.0], [0.7], [1.0, 0.6, 1.7]])
@pytest.mark.parametrize("changes", [{}, {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}])
def test_packed_logprobs_equal_those_of_each_sequence_alone_at_its_own_temperature(tmp_path, changes, temperatures):
    directory = save_tiny_qwen2(tmp_path, **changes)
    backend = build_backend(directory)
    trajectories = [
        replace(trajectory, temperature=temperature)
        for trajectory, temperature in zip(random_trajectories(), cycle(temperatures), strict=False)
    ]
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=10_000)
    order = sorted(range(len(trajectories)), key=lambda index: -trajectories[index].token_ids.size)
    expected = [naive_logprobs(directory, trajectories[index]) for index in order]
    np.testing.assert_allclose(scores_of(backend, pack), np.concatenate(expected), atol=2e-5)


@pytest.mark.parametrize("correction", list(Correction))
def test_gradients_do_not_depend_on_how_trajectories_are_packed(model_directory, correction):
    backend = build_backend(model_directory, loss_settings=loss_with(correction=correction))
    trajectories = random_trajectories()
    found = []
    for budget in (10_000, 40, 1):
        for pack in pack_trajectories(trajectories, max_pack_tokens=budget):
            backend.forward_backward(pack)
        found.append(gradients(backend))
        backend.discard_gradients()
    for other in found[1:]:
        for name, gradient in found[0].items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in found[0].values()) > 0.1


def test_masked_tokens_get_no_gradient_whatever_stands_beside_them(model_directory):
    """A tool's output between two turns is read, never learned: its log-probs and advantages are not even looked at."""
    backend = build_backend(model_directory, loss_settings=loss_with(correction=Correction.TRUNCATED))
    trajectory = build_trajectory(np.random.default_rng(3), num_prompt=3, num_completion=12)
    trajectory.loss_mask[7:11] = False
    found = []
    for logprob, advantage in ((0.0, 0.0), (-30.0, 50.0)):
        trajectory.behavior_logprobs[7:11] = logprob
        trajectory.advantages[7:11] = advantage
        (pack,) = pack_trajectories([trajectory], max_pack_tokens=64)
        assert pack.num_loss_tokens == 8
        backend.forward_backward(pack)
        found.append(gradients(backend))
        backend.discard_gradients()
    assert_equal_tensors(found[0], found[1])
    trajectory.loss_mask[7:11] = True
    backend.forward_backward(pack_trajectories([trajectory], max_pack_tokens=64)[0])
    moved = gradients(backend)
    assert any(not torch.equal(moved[name], gradient) for name, gradient in found[0].items())


def test_zero_advantage_samples_add_nothing_to_the_gradient(model_directory):
    backend = build_backend(model_directory, loss_settings=loss_with(correction=Correction.TRUNCATED))
    trajectory = random_trajectories(count=1)[0]
    trajectory.advantages[:] = 0
    for pack in pack_trajectories([trajectory], max_pack_tokens=64):
        backend.forward_backward(pack)
    assert not any(bool(gradient.any()) for gradient in gradients(backend).values())


def test_a_step_is_adamw_on_the_clipped_mean_gradient(model_directory):
    trajectories = random_trajectories()
    num_tokens = sum(int(item.loss_mask.sum()) for item in trajectories)
    settings = {"learning_rate": 3e-3, "max_grad_norm": 0.05, "weight_decay": 0.1}
    backend = build_backend(model_directory, optimizer=settings)
    for pack in pack_trajectories(trajectories, max_pack_tokens=64):
        backend.forward_backward(pack)
    mean = {name: gradient / num_tokens for name, gradient in gradients(backend).items()}
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in mean.values())).item()
    expected = {}
    for name, parameter in backend._model.named_parameters():
        gradient = mean[name] * min(1.0, 0.05 / (norm + 1e-6))
        expected[name] = parameter.detach() * (1 - 3e-3 * 0.1) - 3e-3 * gradient / (gradient.abs() + 1e-8)
    metrics = backend.optimizer_step(divisor=num_tokens)
    assert metrics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert norm > 0.05
    for name, parameter in backend._model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_training_on_rewarded_tokens_raises_their_logprobs(model_directory):
    backend = build_backend(model_directory)
    trajectories = random_trajectories(count=4)
    for item in trajectories:
        item.advantages[:] = 1
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=10_000)
    before = scores_of(backend, pack).mean()
    for _ in range(5):
        item_logprobs = scores_of(backend, pack)
        backend.forward_backward(
            type(pack)(**{**{name: getattr(pack, name) for name in pack.__slots__}, "behavior_logprobs": item_logprobs})
        )
        backend.optimizer_step(divisor=pack.num_loss_tokens)
    assert scores_of(backend, pack).mean() > before + 0.5


def test_the_learning_rate_warms_up_linearly_and_stays(model_directory):
    backend = build_backend(model_directory, optimizer={"learning_rate": 0.3, "warmup_steps": 3})
    rates = [backend.optimizer_step(divisor=1).learning_rate for _ in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_the_learning_rate_counts_batches_however_many_steps_they_have(model_directory):
    backend = build_backend(model_directory, optimizer={"learning_rate": 0.3, "warmup_steps": 3})
    steps = [backend.optimizer_step(divisor=1, is_last=number % 2 == 1) for number in range(6)]
    assert [step.learning_rate for step in steps] == pytest.approx([0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert steps[-1].num_batches == 3


def test_a_step_without_gradients_still_moves_by_momentum(model_directory):
    backend = build_backend(model_directory)
    train(backend, random_trajectories())
    before = clone(backend.state_tensors())
    metrics = backend.optimizer_step(divisor=7)
    assert metrics.grad_norm == 0
    assert any(not torch.equal(before[name], tensor) for name, tensor in backend.state_tensors().items())


def poisoned_loss(inputs: LossInputs, *, forward: bool, backward: bool) -> LossOutputs:
    loss = inputs.trainer_logprobs.sum()
    if backward:
        # sqrt at zero: a finite value with an infinite slope.
        loss = loss + torch.sqrt(inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).sum()
    if forward:
        loss = loss * float("nan")
    return LossOutputs(loss=loss, sums={}, maxima={})


def test_a_loss_that_is_not_finite_raises_and_adds_no_gradient(model_directory):
    backend = build_backend(model_directory, loss=partial(poisoned_loss, forward=True, backward=False))
    (pack,) = pack_trajectories(random_trajectories(count=2), max_pack_tokens=10_000)
    with pytest.raises(NonFiniteLossError, match="is nan"):
        backend.forward_backward(pack)
    assert not any(bool(gradient.any()) for gradient in gradients(backend).values())


def test_a_gradient_that_is_not_finite_raises_and_takes_no_step(model_directory):
    backend = build_backend(model_directory, loss=partial(poisoned_loss, forward=False, backward=True))
    before = clone(backend.state_tensors())
    (pack,) = pack_trajectories(random_trajectories(count=2), max_pack_tokens=10_000)
    backend.forward_backward(pack)
    with pytest.raises(NonFiniteGradientError, match="no step was taken"):
        backend.optimizer_step(divisor=pack.num_loss_tokens)
    assert_equal_tensors(backend.state_tensors(), before)
    assert not any(bool(gradient.any()) for gradient in gradients(backend).values())
    assert backend.optimizer_step(divisor=1).num_batches == 1


def test_a_pack_without_loss_tokens_adds_nothing(model_directory):
    backend = build_backend(model_directory)
    trajectory = random_trajectories(count=1)[0]
    trajectory.loss_mask[:] = False
    (pack,) = pack_trajectories([trajectory], max_pack_tokens=64)
    assert backend.forward_backward(pack) == LossTotals()


def test_a_reference_model_is_kept_as_loaded(model_directory):
    settings = loss_with(kl_coefficient=0.1)
    backend = build_backend(model_directory, loss_settings=settings, keep_reference=True)
    trajectories = random_trajectories()
    (pack,) = pack_trajectories(trajectories, max_pack_tokens=10_000)
    assert backend.forward_backward(pack).sums["reference_kl"] == pytest.approx(0, abs=1e-4)
    backend.discard_gradients()
    for _ in range(3):
        train(backend, trajectories)
    assert backend.forward_backward(pack).means()["reference_kl"] > 1e-3


@pytest.mark.parametrize("tied", [True, False])
def test_state_tensors_are_named_and_valued_as_in_the_exported_file(tmp_path, tied):
    backend = build_backend(save_tiny_qwen2(tmp_path / "model", tie_word_embeddings=tied))
    train(backend, random_trajectories())
    (tmp_path / "out").mkdir()
    backend.save(tmp_path / "out").result()
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert_equal_tensors(backend.state_tensors(), exported)
    assert ("lm_head.weight" in exported) is not tied
    assert (tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8") == '{"stands": "in"}'
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert torch.equal(loaded["model.norm.weight"], exported["model.norm.weight"])


def test_a_model_whose_files_hold_its_tensors_in_another_form_is_exported_in_that_form(tmp_path):
    """Experts: one by one in files, stacked in the model."""
    source = save_tiny("qwen3_moe", tmp_path / "model")
    (tmp_path / "out").mkdir()
    build_backend(source).save(tmp_path / "out").result()
    assert_equal_tensors(load_file(tmp_path / "out" / "model.safetensors"), load_file(source / "model.safetensors"))
    assert sorted(path.name for path in (tmp_path / "out").glob("m*")) == ["model.safetensors"]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_resumed_backend_takes_bit_identical_steps(tmp_path, model_directory, steps_before):
    settings = {"warmup_steps": 4, "weight_decay": 0.01}
    original = build_backend(model_directory, optimizer=settings)
    for seed in range(steps_before):
        train(original, random_trajectories(seed))
    original.save(tmp_path).result()
    resumed = build_backend(model_directory, optimizer=settings)
    train(resumed, random_trajectories(99))
    resumed.load(tmp_path)
    assert_equal_tensors(resumed.state_tensors(), original.state_tensors())
    after_load = torch.rand(3)
    resumed.load(tmp_path)
    assert torch.equal(torch.rand(3), after_load)
    for seed in (10, 11):
        expected, found = (train(backend, random_trajectories(seed)) for backend in (original, resumed))
        assert found == expected
        assert_equal_tensors(resumed.state_tensors(), original.state_tensors())


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, model_directory):
    (tmp_path / "saved").mkdir()
    build_backend(save_tiny_qwen2(tmp_path / "other", intermediate_size=64)).save(tmp_path / "saved").result()
    backend = build_backend(model_directory)
    before = clone(backend.state_tensors())
    with pytest.raises(CheckpointMismatchError, match="mlp"):
        backend.load(tmp_path / "saved")
    assert_equal_tensors(backend.state_tensors(), before)


def test_a_checkpoint_of_another_element_type_is_refused(tmp_path, model_directory):
    build_backend(model_directory).save(tmp_path).result()
    (path,) = (tmp_path / "resume").glob("*.safetensors")
    halves = {name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in load_file(path).items()}
    save_file(halves, path)
    with pytest.raises(CheckpointMismatchError, match="bfloat16"):
        build_backend(model_directory).load(tmp_path)


def test_a_checkpoint_without_its_moments_is_refused(tmp_path, model_directory):
    backend = build_backend(model_directory)
    train(backend, random_trajectories())
    backend.save(tmp_path).result()
    (path,) = (tmp_path / "resume").glob("*.safetensors")
    save_file({name: tensor for name, tensor in load_file(path).items() if "norm.weight/exp_avg" not in name}, path)
    with pytest.raises(CheckpointMismatchError, match=r"holds no optimizer/.*exp_avg"):
        backend.load(tmp_path)


@pytest.mark.parametrize("config", [MambaConfig, FalconMambaConfig])
def test_a_model_that_leaks_between_packed_samples_is_refused(tmp_path, config):
    torch.manual_seed(0)
    tiny = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "initializer_range": 0.5}
    AutoModelForCausalLM.from_config(config(**tiny)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        build_backend(tmp_path)


def test_totals_merge_by_sum_and_maximum():
    first = LossTotals(num_tokens=2, sums={"loss": 1.0}, maxima={"ratio_max": 3.0})
    second = LossTotals(num_tokens=6, sums={"loss": 3.0, "other": 8.0}, maxima={"ratio_max": 2.0})
    merged = first.merged(second)
    assert merged.means() == {"loss": 0.5, "other": 1.0, "ratio_max": 3.0}
    assert LossTotals().means() == {}


def test_a_checkpoint_without_memory_for_copies_is_written_before_training_goes_on(
    tmp_path, model_directory, monkeypatch
):
    backend = build_backend(model_directory)
    train(backend, random_trajectories())
    backend.save(tmp_path / "copied").result()
    needed = sum(path.stat().st_size for path in (tmp_path / "copied" / "resume").iterdir())
    copies = []
    monkeypatch.setattr(tensor_copies, "_copied", lambda tensors: copies.append(tensors) or tensors)
    monkeypatch.setattr(rank_backend, "memory_share", lambda _: needed)
    written = backend.save(tmp_path / "waited")
    assert written.done()
    assert not copies
    names = [path.relative_to(tmp_path / "copied") for path in (tmp_path / "copied").rglob("*.safetensors")]
    assert len(names) == 2
    for name in names:
        assert (tmp_path / "waited" / name).read_bytes() == (tmp_path / "copied" / name).read_bytes()
    monkeypatch.setattr(rank_backend, "memory_share", lambda _: 3 * needed)
    backend.save(tmp_path / "copied again").result()
    assert copies
