"""Islands of unlike sizes against one process: log-probs, gradient norm, weights, files, checkpoints."""

from __future__ import annotations

import pytest

from services.trainer.batches.rank_partition import partition
from tests.helpers.trainers.equal_training import (
    assert_bit_equal,
    assert_equal,
    assert_trains_as_one,
    made,
    random_trajectories,
    train,
)
from tests.helpers.trainers.two_processes import alone, two_processes, weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
UNLIKE = {"processes": (1.0, 1.0, 1.5), "parallel": {"islands": [2, 1]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("model"), "qwen3", is_tied=True)


@pytest.mark.parametrize(
    ("family", "is_tied"),
    [
        ("qwen2", True),
        ("qwen3_moe", True),
        *(pytest.param(family, False, marks=pytest.mark.grid) for family in ("llama", "qwen3")),
    ],
)
def test_two_shards_and_a_whole_copy_train_as_one_process(tmp_path, family, is_tied):
    folder = made(tmp_path / "model", family, is_tied=is_tied)
    one = alone(folder)
    with two_processes(folder, **UNLIKE) as three:
        assert three.shares == (1.0, 1.0, 1.5)
        assert_trains_as_one(three, one)


@pytest.mark.grid
@pytest.mark.parametrize("islands", [[1, 1], [1, 3]])
def test_islands_of_other_sizes_train_as_one_process(model, islands):
    one = alone(model)
    with two_processes(model, processes=sum(islands), parallel={"islands": islands}) as many:
        assert_trains_as_one(many, one)


@pytest.mark.parametrize("other", [{"lora": True}, {"algorithm": {"name": "ppo"}}])
def test_adapters_and_critics_train_in_islands_as_in_one_process(model, tmp_path, other):
    one = alone(model, **other)
    with two_processes(model, **UNLIKE, **other) as three:
        assert train(three, 2) == pytest.approx(train(one, 2), rel=1e-5, abs=1e-5)
        assert_equal(weights(three), weights(one))
        three.save(tmp_path).result()
        one.load(tmp_path)
        assert_bit_equal(weights(one), weights(three))


def test_a_checkpoint_continues_in_one_process_and_one_s_in_islands(model, tmp_path):
    one = alone(model)
    with two_processes(model, **UNLIKE) as three:
        train(three, 1)
        (tmp_path / "islands").mkdir()
        three.save(tmp_path / "islands").result()
        one.load(tmp_path / "islands")
        assert_bit_equal(weights(one), weights(three))
        assert train(one, 1) == pytest.approx(train(three, 1), rel=1e-5, abs=1e-5)
        (tmp_path / "one").mkdir()
        one.save(tmp_path / "one").result()
        three.load(tmp_path / "one")
        assert_bit_equal(weights(three), weights(one))
        assert train(three, 2) == pytest.approx(train(one, 2), rel=1e-4, abs=1e-5)


def test_the_published_file_is_that_of_one_process(model, tmp_path):
    one = alone(model)
    expected = one.write_weights(tmp_path / "one.safetensors").result()
    with two_processes(model, **UNLIKE) as three:
        found = three.write_weights(tmp_path / "three.safetensors").result()
    assert found.tensors == expected.tensors
    assert (tmp_path / "three.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()


def test_packs_follow_the_shares(model):
    trajectories = random_trajectories(24)
    rounds = partition(trajectories, max_pack_tokens=256, shares=UNLIKE["processes"])
    tokens = [sum(pack.token_ids.size for pack in packs if pack) for packs in zip(*rounds, strict=True)]
    assert tokens[2] > max(tokens[:2])
