"""Settings of algorithms that contradict each other are refused, with the field to change."""

import re

import pytest
from pydantic import ValidationError

from services.trainer.algorithms.terms.correction import Correction
from services.trainer.config import TrainingConfig
from services.trainer.run.policy_loading import loss_settings
from services.trainer.run_sections import critic_rate
from services.trainer.step.step_settings import step_settings

TEACHER = {"reference": "service", "reference_path": "t"}


def config(algorithm, **sections):
    document = {"model": {"path": "m"}, "data": {"train": "d.jsonl"}, "algorithm": algorithm}
    return TrainingConfig.model_validate(document | sections)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"name": "grppo"}, "must be one of grpo, dr_grpo, dapo"),
        ({"name": "tba"}, "algorithm.kl_coefficient: tba"),
        ({"name": "grpo", "num_replayed_groups": 4}, "algorithm.num_replayed_groups: grpo"),
        ({"group_size": 1}, "algorithm.group_size: 1 leaves grpo nothing to compare"),
        ({"prompts_per_step": 3, "num_minibatches": 4}, "algorithm.num_minibatches: 4 is more than"),
        ({"reference_refresh_steps": 5}, "algorithm.reference_refresh_steps: without kl_coefficient"),
        ({"reference": "service"}, "algorithm.reference: service has no effect without algorithm.kl_coefficient"),
        (
            {"reference": "service", "kl_coefficient": 0.1, "reference_refresh_steps": 5},
            "algorithm.reference_refresh_steps: a scorer's model is frozen",
        ),
        ({"reference_path": "t", "kl_coefficient": 0.1}, "algorithm.reference_path: .*t: the trainer's reference is"),
        ({"critic": "service"}, "algorithm.critic: service, but grpo has no critic; leave it out, or set"),
        ({"name": "distill"}, "algorithm.kl_coefficient: distill needs a KL; set it, for example to 1.0"),
        ({"name": "distill", "kl_coefficient": 1.0}, "algorithm.reference_path: distill learns from a teacher"),
        (
            {"name": "distill_with_reward", "kl_coefficient": 1.0, "group_size": 1, **TEACHER},
            "algorithm.group_size: 1 leaves distill_with_reward nothing to compare",
        ),
    ],
)
def test_contradictions_are_refused(algorithm, message):
    with pytest.raises(ValidationError, match=message):
        config(algorithm)


def test_a_critic_of_its_own_takes_packs_up_to_a_size_and_leaves_the_trainer_free_of_its_limits():
    ppo = {"name": "ppo", "critic": "service"}
    with pytest.raises(ValidationError, match=r"algorithm.critic: .* packs of at most 524288 tokens, and .* is 600000"):
        config(ppo, trainer={"tokens_per_pack": 600_000})
    pipeline = {"processes": 2, "parallel": {"pipeline": 2, "shard": 1}}
    with pytest.raises(ValidationError, match=r"trainer.parallel.pipeline: 2 is not supported with lora beside the"):
        config({"name": "ppo"}, lora={}, trainer=pipeline)
    config(ppo, lora={}, trainer=pipeline)
    config(ppo, trainer={"processes": 2, "offload": True})


def test_distillation_trains_on_groups_of_one_and_of_equal_rewards():
    settings = {"name": "distill", "kl_coefficient": 1.0, "group_size": 1, **TEACHER}
    assert config(settings).algorithm.has_scorer
    with pytest.raises(ValidationError, match=r"policy.drops_zero_variance: distill also learns from groups of equal"):
        config(settings | {"group_size": 2}, policy={"drops_zero_variance": True})
    with pytest.raises(ValidationError, match=r"data.train: null is a run of groups that others put"):
        config(settings, data={"train": None})


@pytest.mark.parametrize(
    ("section", "setting", "value"),
    [
        ("algorithm", "kl_coefficient", -1.0),
        ("algorithm", "max_importance_weight", 0.5),
        ("sampling", "max_new_tokens", 0),
    ],
)
def test_loss_settings_without_meaning_are_refused(section, setting, value):
    sections = {"algorithm": {}, section: {setting: value}}
    with pytest.raises(ValidationError, match=f"{section}.{setting}\n.*greater than or equal to"):
        config(**sections)


def test_groups_that_cannot_be_delivered_are_refused():
    with pytest.raises(ValidationError, match=r"sampling.max_new_tokens: .* 512 samples .* of 32769 tokens"):
        config({"group_size": 512}, sampling={"max_new_tokens": 32_769})
    config({"group_size": 512}, sampling={"max_new_tokens": 32_768})


@pytest.mark.parametrize(
    "sampling", [{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.05}, {"repetition_penalty": 1.1}, {"logit_bias": {"3": 1}}]
)
def test_another_distribution_than_the_trainers_is_refused(sampling):
    ((name, value),) = sampling.items()
    with pytest.raises(ValidationError, match=re.escape(f"{name}: {value!r} would sample") + f".*leave {name} out"):
        config({}, sampling=sampling)


def test_ways_to_sample_that_change_nothing_are_taken():
    made = config({}, sampling={"top_p": 1.0, "top_k": -1, "min_p": 0.0, "temperature": 0.7}).sampling
    assert made.temperature == 0.7
    with pytest.raises(ValidationError, match="greater than or equal to"):
        config({}, sampling={"temperature": 0})


def test_an_adapters_reference_cannot_be_refreshed():
    with pytest.raises(ValidationError, match="with lora the reference is the model itself"):
        config({"kl_coefficient": 0.1, "reference_refresh_steps": 5}, lora={"rank": 4})


def test_a_kl_is_either_a_term_of_the_loss_or_taken_off_the_rewards():
    for name, is_in_reward in (("grpo", False), ("ppo", True), ("tba", True)):
        run = config({"name": name, "kl_coefficient": 0.25})
        in_loss = loss_settings(run).kl_coefficient
        in_reward = step_settings(run, policy_version=0).reward_kl_coefficient
        assert (in_loss, in_reward) == ((0.0, 0.25) if is_in_reward else (0.25, 0.0))


@pytest.mark.parametrize(
    ("name", "correction", "is_needed"),
    [("grpo", "truncated", True), ("grpo", "none", False), ("tba", "truncated", False)],
)
def test_proximal_log_probs_are_needed_where_a_correction_weighs_them(name, correction, is_needed):
    chosen = {"name": name, "correction": correction, "max_staleness": 0, "kl_coefficient": 0.1}
    run = config(chosen | {"num_minibatches": 4})
    settings = step_settings(run, policy_version=0)
    assert (settings.num_minibatches, settings.needs_proximal) == (4, is_needed)


def test_trajectory_balance_is_never_corrected_and_a_critic_always_trained():
    tba = config({"name": "tba", "kl_coefficient": 0.1, "correction": "masked"})
    assert loss_settings(tba).correction is Correction.NONE
    ppo = config({"name": "ppo"})
    assert not step_settings(ppo, policy_version=0).skip_zero_advantages
    assert step_settings(config({"name": "grpo"}), policy_version=0).skip_zero_advantages


@pytest.mark.parametrize(("policy", "stated", "expected"), [(1e-6, None, 1e-5), (4e-4, None, 4e-4), (1e-6, 3e-6, 3e-6)])
def test_a_critic_learns_faster_than_a_large_policy_and_as_fast_as_a_small_one(policy, stated, expected):
    run = config({"name": "ppo", "critic_learning_rate": stated}, optimizer={"learning_rate": policy})
    assert critic_rate(run) == pytest.approx(expected)
