"""On-policy distillation: its formula in float64, and a tiny student that approaches a tiny teacher."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import log_softmax
from transformers import AutoModelForCausalLM

from services.trainer.algorithms.loss import LossInputs, policy_loss
from services.trainer.algorithms.registry import ALGORITHMS
from services.trainer.algorithms.terms.correction import Correction
from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.training_sample import TrainingSample, trajectory_of
from services.trainer.config import TrainingConfig
from services.trainer.run.policy_loading import local_backend
from services.trainer.scorer.frozen_model import FrozenModel
from services.trainer.step.step import TrainingStep
from services.trainer.step.step_settings import step_settings
from tests.unit.trainer.algorithms.naive import naive_loss, random_samples
from tests.unit.trainer.algorithms.test_policy_loss import settings_of, step_divisor, torch_inputs
from tests.unit.trainer.builders import VOCAB_SIZE, save_tiny_qwen2

NUM_TOKENS, NUM_SAMPLES, NUM_STEPS = 8, 32, 40
PROMPT = (3, 5, 7)


@pytest.mark.parametrize("correction", list(Correction))
@pytest.mark.parametrize("name", ["distill", "distill_with_reward"])
def test_the_teacher_is_in_the_advantages(name, correction):
    settings = settings_of(name, correction=correction, kl_coefficient=0.5)
    samples = random_samples(seed=5)
    inputs = torch_inputs(samples)
    outputs = policy_loss(inputs, algorithm=ALGORITHMS[name], settings=settings)
    gaps = [sample["reference"] - sample["trainer"] for sample in samples]
    taught = [
        sample | {"advantages": sample["advantages"] + 0.5 * gap} for sample, gap in zip(samples, gaps, strict=True)
    ]
    expected = naive_loss(name, taught, settings_of(name, correction=correction))
    assert outputs.loss.item() / step_divisor(samples, settings) == pytest.approx(expected, rel=1e-12)
    assert outputs.sums["reference_kl"].item() == pytest.approx(-np.concatenate(gaps).sum(), rel=1e-12)


def test_its_gradient_is_that_of_the_reverse_kl():
    """On average over what the student samples, here over every token of a tiny vocabulary."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = log_softmax(torch.tensor([1.0, 0.2, -0.4, 0.0], dtype=torch.float64), dim=0)
    student = log_softmax(logits, dim=0)
    (expected,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)
    settings = settings_of("distill", kl_coefficient=1.0)
    found = torch.zeros_like(logits)
    for token in range(4):
        logprob = student[token : token + 1]
        nothing = {"advantages": torch.zeros(1, dtype=torch.float64), "segments": torch.zeros(1, dtype=torch.int64)}
        inputs = LossInputs(
            trainer_logprobs=logprob,
            behavior_logprobs=logprob.detach(),
            reference_logprobs=teacher[token : token + 1],
            **nothing,
        )
        loss = policy_loss(inputs, algorithm=ALGORITHMS["distill"], settings=settings).loss
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        found += student[token].detach().exp() * gradient
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def sampled(model, step: int) -> list[TrainingSample]:
    """Completions drawn from the student, groups of one."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.tensor([PROMPT] * NUM_SAMPLES)
    logprobs = []
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            distribution = log_softmax(model(tokens).logits[:, -1], dim=-1)
            drawn = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs.append(distribution.gather(1, drawn))
            tokens = torch.cat([tokens, drawn], dim=1)
    behavior = torch.cat(logprobs, dim=1).numpy()
    return [
        TrainingSample(
            group_id=f"g{step}-{index}",
            sample_index=0,
            prompt_token_ids=np.array(PROMPT, dtype=np.int32),
            completion_token_ids=tokens[index, len(PROMPT) :].numpy().astype(np.int32),
            behavior_logprobs=behavior[index],
            policy_versions=np.zeros(NUM_TOKENS, dtype=np.int64),
            reward=0.0,
        )
        for index in range(NUM_SAMPLES)
    ]


def taught(samples: list[TrainingSample], teacher: FrozenModel) -> list[list[TrainingSample]]:
    """The same with the teacher's log-probs, a group each."""
    trajectories = [trajectory_of(sample, 0.0) for sample in samples]
    found = {}
    for pack in pack_trajectories(trajectories, max_pack_tokens=256):
        found |= dict(pack.by_member(teacher.logprobs(pack)))
    return [[replace(sample, reference_logprobs=found[index])] for index, sample in enumerate(samples)]


def exact_kl(student, teacher, samples: list[TrainingSample]) -> float:
    """Mean per token of KL(student, teacher) over the vocabulary, in states that the student visits."""
    rows = torch.tensor(np.array([[*PROMPT, *sample.completion_token_ids] for sample in samples]), dtype=torch.int64)
    with torch.no_grad():
        of_student = log_softmax(student(rows).logits[:, len(PROMPT) - 1 : -1], dim=-1)
        of_teacher = log_softmax(teacher(rows).logits[:, len(PROMPT) - 1 : -1], dim=-1)
    return float((of_student.exp() * (of_student - of_teacher)).sum(dim=-1).mean())


def test_a_student_approaches_its_teacher(tmp_path):
    """Of another size and other weights; the vocabulary is all that they share."""
    teacher_path = save_tiny_qwen2(tmp_path / "teacher", seed=1, hidden_size=48, num_hidden_layers=3)
    config = TrainingConfig.model_validate(
        {
            "model": {"path": save_tiny_qwen2(tmp_path / "student", seed=0)},
            "data": {"train": "rows.jsonl"},
            "trainer": {"device": "cpu"},
            "algorithm": {
                "name": "distill",
                "group_size": 1,
                "kl_coefficient": 1.0,
                "reference": "service",
                "reference_path": teacher_path,
                "max_staleness": 0,
            },
            "optimizer": {"learning_rate": 5e-3},
        }
    )
    teacher = FrozenModel(teacher_path, device="cpu")
    whole_teacher = AutoModelForCausalLM.from_pretrained(teacher_path).eval()
    assert teacher.vocab_size == VOCAB_SIZE
    backend = local_backend(config)
    student = AutoModelForCausalLM.from_pretrained(config.model.path).eval()
    before = exact_kl(student, whole_teacher, sampled(student, NUM_STEPS))
    estimates = []
    for number in range(NUM_STEPS):
        step = TrainingStep(backend, step_settings(config, policy_version=0))
        assert step.add_groups(taught(sampled(student, number), teacher)) == ()
        estimates.append(step.finish().loss_metrics["reference_kl"])
        student.load_state_dict(backend.state_tensors(), strict=False)
    after = exact_kl(student, whole_teacher, sampled(student, NUM_STEPS))
    assert estimates[0] == pytest.approx(before, rel=0.25)
    # From 1.35 nats a token to 0.51.
    assert after < before / 2
    assert estimates[-1] < estimates[0] / 2
