"""How a run fits the memory of its processes' devices: activations computed again, or refused."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import held_bytes, published_bytes, working_bytes
from services.trainer.distributed import memory_share
from services.trainer.model.backend import BackendError
from services.trainer.model.ranks import Ranks
from services.trainer.run.memory_fit import USABLE, recomputes_activations, training_mode
from services.trainer.run.policy_loading import local_backend
from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.two_processes import config_of


class Others(Ranks):
    """Process 0 of two, of which the other has so much memory."""

    num_ranks = num_shards = 2

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def smallest(self, number: int) -> int:
        return min(number, self._memory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def memory(monkeypatch):
    def have(num_bytes: float) -> None:
        monkeypatch.setattr(memory_share, "available_bytes", lambda: int(num_bytes))

    have(1e12)
    return have


def needs(model, *, num_shards=1):
    """Bytes held, and at the peak, of which the run uses USABLE."""
    shape = read_shape(model)
    mode = training_mode(config_of(model), num_shards=num_shards, is_half=False, is_on_cpus=True)
    held = held_bytes(shape, mode)
    return held, (held + published_bytes(shape, mode) + working_bytes(shape, mode)) / USABLE


def chosen(model, ranks=None, given=None):
    config = config_of(model, gradient_checkpointing=given)
    with capture_logs() as logs:
        return recomputes_activations(config, ranks or Ranks()), logs


def test_activations_are_kept_where_they_fit(model, memory):
    _, peak = needs(model)
    memory(peak + 8)
    recomputes, logs = chosen(model)
    assert not recomputes
    assert [each["event"] for each in logs] == ["memory of each process"]


def test_activations_are_computed_again_where_they_do_not_fit(model, memory):
    _, peak = needs(model)
    memory(peak - 8)
    assert chosen(model)[0]


@pytest.mark.parametrize("given", [True, False])
def test_a_setting_decides_and_what_may_not_fit_is_a_warning(model, memory, given):
    held, _ = needs(model)
    memory(held + 8)
    recomputes, logs = chosen(model, given=given)
    assert recomputes is given
    assert "memory may not suffice" in [each["event"] for each in logs]


def test_the_smallest_memory_decides_for_all(model, memory):
    _, peak = needs(model, num_shards=2)
    assert chosen(model, Others(int(peak - 8)))[0]
    assert not chosen(model, Others(int(peak + 8)))[0]


def test_processes_of_one_machine_share_its_memory(model, memory):
    _, peak = needs(model, num_shards=2)
    memory(2 * peak - 16)
    assert chosen(model, Others(2**50))[0]
    memory(2 * peak + 16)
    assert not chosen(model, Others(2**50))[0]


def test_what_cannot_be_held_is_refused_before_the_model_is_loaded(model, memory):
    held, _ = needs(model)
    memory(held - 8)
    with pytest.raises(BackendError, match=r"each of 1 processes needs 0.0 GB .* more machines, or train an adapter"):
        local_backend(config_of(model, gradient_checkpointing=None))
    # An adapter's base is a quarter of that.
    recomputes_activations(config_of(model, lora=True), Ranks())


def test_a_model_of_unknown_shape_is_trained_as_before(model, memory, tmp_path):
    for path in model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}', encoding="utf-8")
    recomputes, logs = chosen(tmp_path)
    assert not recomputes
    assert "config.json has no hidden_size" in logs[0]["problem"]


def test_the_choice_reaches_the_model(model, memory):
    _, peak = needs(model)
    memory(peak - 8)
    backend = local_backend(config_of(model, gradient_checkpointing=None))
    assert backend._model.is_gradient_checkpointing
