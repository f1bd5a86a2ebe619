"""A critic's own process without network and PyTorch: where it can go, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.config import ConfigError
from penstock.errors import (
    FencedError,
    InvalidFieldError,
    OffsetMismatchError,
    RunConflictError,
    UnknownRunError,
    VersionConflictError,
)
from penstock.v1 import critic_pb2
from penstock.wire.codec import int32_bytes
from services.trainer.compute.speed import Speed
from services.trainer.critic.critic_run import CriticRun
from tests.helpers.trainers.critics import POISON, OneNumber, critic_packs, make_critic, opening


class Trainer:
    """Calls a critic as a trainer does."""

    def __init__(self, critic, version=0, *, epoch=1, oldest=0):
        self.critic, self.gradient_id, self.oldest = critic, 0, oldest
        self.place = critic_pb2.CriticPlace(epoch=epoch, policy_version=version)
        critic.open(opening(version, epoch=epoch))

    def values(self):
        request = critic_pb2.EvaluatePackRequest(run_id="r", place=self.place, pack=critic_packs(1)[0])
        return self.critic.evaluate(request).tolist()

    def accumulate(self, packs, *, first=0):
        for index, pack in enumerate(packs, first):
            yield self.critic.accumulate(
                critic_pb2.AccumulateGradientRequest(
                    run_id="r", place=self.place, gradient_id=self.gradient_id, index=index, pack=pack
                )
            )

    def step_request(self, num_packs, *, is_last):
        return critic_pb2.StepCriticRequest(
            run_id="r", place=self.place, gradient_id=self.gradient_id, num_packs=num_packs, rate_factor=0.5,
            is_last=is_last, oldest_policy_version=self.oldest,
        )  # fmt: skip

    def minibatch(self, packs, *, is_last):
        self.gradient_id += 1
        list(self.accumulate(packs))
        self.critic.step(self.step_request(len(packs), is_last=is_last), on_recorded=lambda: None)
        self.place.minibatch += 1
        if is_last:
            self.place.policy_version, self.place.minibatch = self.place.policy_version + 1, 0

    def step(self):
        """Two minibatches of two packs, other ones in every step."""
        packs = critic_packs(4, first_token=3 + self.place.policy_version)
        self.minibatch(packs[:2], is_last=False)
        self.minibatch(packs[2:], is_last=True)


def die(critic):
    critic.release()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "critic"


def values_by_version(folder, num_steps, **settings):
    trainer = Trainer(make_critic(folder, **settings))
    found = [trainer.values()]
    for _ in range(num_steps):
        trainer.step()
        found.append(trainer.values())
    return trainer, found


def test_a_critic_that_died_is_where_it_was_and_can_go_back_to_every_step_since_the_trainers_oldest(folder):
    trainer, found = values_by_version(folder, 5, every=2)
    assert len({tuple(each) for each in found}) == 6
    die(trainer.critic)
    for version in (5, 3, 2, 1, 0):
        critic = make_critic(folder)
        again = Trainer(critic, version)
        assert again.values() == found[version]
        die(critic)
    again = Trainer(make_critic(folder), 0)
    for version in range(1, 6):
        again.step()
        assert again.values() == found[version]


def test_its_speed_is_that_of_whole_steps_without_those_taken_again(folder):
    now_s, slow = [0.0], lambda: Speed(monotonic_s=lambda: now_s.__setitem__(0, now_s[0] + 1.0) or now_s[0])
    trainer = Trainer(make_critic(folder))
    trainer.critic.speed = slow()
    trainer.values()
    assert trainer.critic.speed.tokens_per_second == 0.0
    for _ in range(2):
        # Six calls of a second each: four gradients and two optimiser steps.
        trainer.step()
    assert trainer.critic.speed.tokens_per_second == 8 / 13
    trainer.values()
    die(trainer.critic)
    again = make_critic(folder)
    again.speed = slow()
    Trainer(again, 1).step()
    assert again.speed.tokens_per_second == 0.0


def test_with_a_storage_it_goes_on_on_any_machine_and_only_the_one_opened_last_takes_steps(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = values_by_version(folder, 7)[1]
    stored = f"file://{tmp_path}/storage"
    one, other = (make_critic(tmp_path / name, stored=stored) for name in ("one", "other"))
    trainer = Trainer(one)
    for _ in range(5):
        trainer.step()
    # It has moved while the first machine is still there, as when that one cannot be reached.
    moved = Trainer(other, 5)
    assert moved.values() == expected[5]
    moved.step()
    with pytest.raises(UnknownRunError, match="another process of this critic was opened since"):
        trainer.step()
    with pytest.raises(UnknownRunError, match="another process of this critic was opened since"):
        one.evaluate(critic_pb2.EvaluatePackRequest(run_id="r", place=moved.place, pack=critic_packs(1)[0]))
    back = Trainer(one, 6, epoch=2)
    assert back.values() == expected[6]
    back.step()
    # The trainer goes back to its own checkpoint, on a third machine.
    again = Trainer(make_critic(tmp_path / "third", stored=stored), 3, epoch=3)
    for version in range(3, 8):
        assert again.values() == expected[version]
        again.step()
    again.critic.finish()
    assert not list(tmp_path.glob("third/checkpoints/step_*")), "the machine keeps none of it"
    with pytest.raises(FencedError, match="epoch 3"):
        one.open(opening(7, epoch=2))
    empty = make_critic(tmp_path / "empty", stored=f"file://{tmp_path}/elsewhere")
    with pytest.raises(VersionConflictError, match=r"checkpoint_storage: file://.*/elsewhere is empty, but the"):
        empty.open(opening(3))


def test_it_returns_into_the_middle_of_a_step_and_takes_no_step_twice(folder):
    trainer, _ = values_by_version(folder, 1, every=10)
    trainer.minibatch(critic_packs(2), is_last=False)
    # The answer was lost: the trainer asks again for what was taken.
    trainer.place.minibatch = 0
    trainer.critic.step(trainer.step_request(2, is_last=False), on_recorded=lambda: None)
    trainer.place.minibatch = 1
    weight = trainer.critic._model.weight
    die(trainer.critic)
    critic = make_critic(folder)
    critic.open(opening(1, 1))
    assert critic._model.weight == weight
    die(critic)
    # It died after the journal and before the answer: the trainer knows of no step, and takes it again.
    critic = make_critic(folder)
    critic.open(opening(1, 0))
    assert critic._model.weight != weight
    trainer.critic, trainer.place.minibatch = critic, 0
    trainer.minibatch(critic_packs(2), is_last=False)
    assert critic._model.weight == weight


def test_steps_are_taken_again_with_the_settings_with_which_they_were_taken(folder):
    trainer, _ = values_by_version(folder, 1, every=10)
    trainer.critic.open(opening(1, learning_rate=0.05))
    trainer.step()
    values = trainer.values()
    die(trainer.critic)
    critic = make_critic(folder)
    critic.open(opening(2, learning_rate=0.1))
    trainer.critic = critic
    assert trainer.values() == values
    critic.open(opening(2, learning_rate=0.1))
    with pytest.raises(InvalidFieldError, match=r"optimizer: learning_rate: .*greater than 0"):
        critic.open(opening(2, learning_rate=0.0))


def test_it_keeps_what_the_trainer_may_go_back_to_and_no_more(folder):
    trainer = Trainer(make_critic(folder, every=2))
    for _ in range(9):
        trainer.oldest = max(0, trainer.place.policy_version - 3)
        trainer.step()
    steps = sorted(int(path.name.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_?"))
    assert steps[0] == 4
    assert min(each.policy_version for each in trainer.critic._kept._journal.positions()) == 4
    with pytest.raises(VersionConflictError, match=r"leads to version 0, but the trainer is at version 3"):
        trainer.critic.open(opening(3))


def test_values_are_those_of_the_trainers_version_or_refused(folder):
    trainer, _ = values_by_version(folder, 2)
    trainer.place.policy_version = 1
    with pytest.raises(VersionConflictError, match="the critic is at version 2, the call is for version 1"):
        trainer.values()
    trainer.place.policy_version = 2
    trainer.minibatch(critic_packs(1), is_last=False)
    with pytest.raises(InvalidFieldError, match="minibatch"):
        trainer.values()


def test_a_gradient_is_of_all_its_packs_in_order_and_of_one_attempt(folder):
    trainer = Trainer(make_critic(folder))
    first, second = trainer.accumulate(critic_packs(2))
    assert [first.value_loss, second.value_loss] == pytest.approx([15, 15])
    # Sent again, it is answered and not added.
    assert list(trainer.accumulate(critic_packs(2)))[1] == second
    with pytest.raises(OffsetMismatchError, match="has 2 packs"):
        list(trainer.accumulate(critic_packs(1), first=3))
    with pytest.raises(OffsetMismatchError, match="2 of 3"):
        trainer.critic.step(trainer.step_request(3, is_last=True), on_recorded=pytest.fail)
    trainer.gradient_id = 1
    assert next(trainer.accumulate(critic_packs(1))) == first
    trainer.gradient_id = 0
    with pytest.raises(OffsetMismatchError, match="given up"):
        list(trainer.accumulate(critic_packs(1)))


def test_a_pack_without_a_finite_loss_is_not_added(folder):
    trainer = Trainer(make_critic(folder))
    poisoned, good = critic_packs(1, first_token=POISON)[0], critic_packs(1)[0]
    [answer] = trainer.accumulate([poisoned])
    assert np.isnan(answer.value_loss)
    assert [each.value_loss for each in trainer.accumulate([good])] == [15]


def test_it_serves_one_run_and_its_newest_trainer(folder):
    trainer, _ = values_by_version(folder, 1)
    critic = trainer.critic
    with pytest.raises(RunConflictError, match=r"holds the critic of run 'r' \(instance i\), not of 'r' \(other\)"):
        critic.open(opening(instance="other"))
    critic.open(opening(1, epoch=2))
    with pytest.raises(FencedError, match="epoch 2"):
        trainer.values()
    with pytest.raises(FencedError, match="epoch 2"):
        critic.open(opening(1, epoch=1))
    with pytest.raises(ConfigError, match="another critic works there"):
        make_critic(folder)
    die(critic)
    with pytest.raises(FencedError, match="epoch 2"):
        make_critic(folder).open(opening(1, epoch=1))


def test_an_empty_folder_is_refused_in_the_middle_of_a_run(folder):
    critic = make_critic(folder)
    with pytest.raises(VersionConflictError, match=r"is empty, but the trainer has taken steps: give the critic the"):
        critic.open(opening(3))
    trainer = Trainer(critic)
    die(critic)
    trainer.critic = make_critic(folder)
    with pytest.raises(UnknownRunError, match="call OpenCritic"):
        trainer.values()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("token_ids", int32_bytes([1, 2, 32, 4, 1, 2, 5, 6]), "pack.token_ids: 32; must be below 32"),
        ("token_ids", b"123", "pack.token_ids"),
        ("segment_lengths", [4, 5], "pack.segment_lengths"),
        ("target_positions", int32_bytes([2, 3, 6, 8]), "pack.target_positions"),
        ("target_positions", int32_bytes([2, 3, 4, 7]), "none that begins a sample"),
        ("values", b"", "pack.values: '0 numbers'; must be 4"),
        ("returns", np.full(4, np.nan, dtype=np.float32).tobytes(), "pack.returns: 'not finite'"),
    ],
)
def test_a_malformed_pack_is_refused_by_name(folder, field, value, message):
    [pack] = critic_packs(1)
    pack.ClearField(field)
    if isinstance(value, bytes):
        setattr(pack, field, value)
    else:
        getattr(pack, field).extend(value)
    with pytest.raises(InvalidFieldError, match=message):
        list(Trainer(make_critic(folder)).accumulate([pack]))


def test_a_folder_of_another_run_is_refused_before_it_serves(folder):
    first = make_critic(folder)
    first.open(opening())
    first.release()

    def again(run_id: str) -> CriticRun:
        return CriticRun(folder, make_model=OneNumber, checkpoint_every_steps=2, run_id=run_id)

    with pytest.raises(ConfigError, match=r"state_dir: .* holds the critic of run 'r', not of 'other'; give"):
        again("other")
    # Nor does the refused one keep the folder from its own run.
    again("r").release()
