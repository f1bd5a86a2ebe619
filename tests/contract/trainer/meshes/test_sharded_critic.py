"""A critic of its own in two processes against one: values, gradients, steps, checkpoints, errors."""

from __future__ import annotations

from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch.distributed as dist

from services.trainer.batches.packing import join
from services.trainer.critic.config import CriticConfig
from services.trainer.critic.trained_critic import TrainedCritic
from services.trainer.distributed import launch
from services.trainer.model.backend import NonFiniteLossError
from services.trainer.run_sections import OptimizerConfig
from tests.helpers.trainers.two_processes import on_lost
from tests.helpers.trainers.warm_ranks import WarmRank
from tests.unit.trainer.builders import build_trajectory, save_tiny_qwen2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def model(tmp_path):
    return save_tiny_qwen2(tmp_path / "model")


@contextmanager
def critic(model, folder, monkeypatch, *, processes):
    monkeypatch.setattr(launch, "start_rank", WarmRank)
    config = CriticConfig(run_id="r", model_path=model, state_dir=folder, device="cpu", processes=processes)
    try:
        with closing(TrainedCritic(config, model, on_lost=on_lost)) as made:
            made.configure(OptimizerConfig(learning_rate=1e-2))
            yield made
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def packs(seed, *, num_samples):
    """A pack of that many samples, and one of a single sample, which the second process has no part of."""
    rng = np.random.default_rng(seed)
    for count in (num_samples, 1):
        members = []
        for _ in range(count):
            blank = build_trajectory(rng, num_prompt=3, num_completion=int(rng.integers(2, 9)))
            size = blank.token_ids.size
            values, returns = np.zeros(size, dtype=np.float32), rng.normal(size=size).astype(np.float32)
            members.append(replace(blank, values=values, returns=returns))
        yield join(members, range(count))


def stepped(made, seed):
    """What it reports of a minibatch, and its values afterwards."""
    found = [made.accumulate(pack) for pack in packs(seed, num_samples=5)]
    made.step(rate_factor=0.5, is_last=True)
    return np.array(found), np.concatenate([made.values(pack) for pack in packs(seed, num_samples=5)])


def test_two_processes_learn_as_one_and_go_on_from_each_others_checkpoints(model, tmp_path, monkeypatch):
    with critic(model, tmp_path, monkeypatch, processes=1) as one:
        alone = [stepped(one, seed) for seed in range(2)]
        (tmp_path / "one").mkdir()
        one.save(tmp_path / "one").result()
        third = stepped(one, 2)
    with critic(model, tmp_path, monkeypatch, processes=2) as two:
        for seed, (reported, values) in enumerate(alone):
            found_reports, found_values = stepped(two, seed)
            np.testing.assert_allclose(found_reports, reported, rtol=1e-4)
            np.testing.assert_allclose(found_values, values, rtol=1e-4, atol=1e-5)
        assert np.abs(alone[1][1]).max() > 0.01
        (tmp_path / "two").mkdir()
        two.save(tmp_path / "two").result()
        two.load(tmp_path / "one")
        np.testing.assert_allclose(stepped(two, 2)[1], third[1], rtol=1e-4, atol=1e-5)

        [bad, _] = packs(3, num_samples=5)
        with pytest.raises(NonFiniteLossError, match="the critic's loss of"):
            two.accumulate(replace(bad, returns=np.full_like(bad.returns, np.nan)))
        two.discard_gradients()
    with critic(model, tmp_path, monkeypatch, processes=1) as one:
        one.load(tmp_path / "two")
        np.testing.assert_allclose(stepped(one, 2)[1], third[1], rtol=1e-4, atol=1e-5)
