"""How a run fits the memory of its processes' devices: activations computed again, or refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import held_bytes, published_bytes, working_bytes
from services.trainer.distributed import memory_share
from services.trainer.model.backend import BackendError
from services.trainer.model.ranks import Ranks
from services.trainer.run import memory_fit
from services.trainer.run.memory_fit import USABLE, recomputes_activations, training_mode
from services.trainer.run.policy_loading import local_backend
from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.two_processes import config_of


class Pair(Ranks):
    """One of two processes, each a thread here, with so much memory of its own."""

    num_ranks = 2

    def __init__(self, meeting, memory, *, rank, num_stages=1):
        self._meeting, self.memory, self.rank = meeting, memory, rank
        self.num_stages, self.num_shards, self.stage_index = num_stages, 2 // num_stages, rank % num_stages

    def smallest(self, number):
        return self._meeting.smallest(self.rank, number)

    def agree(self, is_so):
        return bool(self.smallest(int(is_so)))


class Meeting:
    """Where both wait for each other's number."""

    def __init__(self):
        self._numbers = [0, 0]
        self._barrier = threading.Barrier(2, timeout=30)

    def smallest(self, rank, number):
        self._numbers[rank] = number
        self._barrier.wait()
        least = min(self._numbers)
        self._barrier.wait()
        return least


def chosen_by_two(config, memories, monkeypatch, **details):
    """What both processes say."""
    monkeypatch.setattr(memory_fit, "_device_bytes", lambda _device, ranks: int(ranks.memory))
    meeting = Meeting()
    pair = [Pair(meeting, memory, rank=rank, **details) for rank, memory in enumerate(memories)]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(recomputes_activations, config, ranks) for ranks in pair]
    errors = [call.exception() for call in calls]
    return [str(error) for error in errors] if any(errors) else [call.result() for call in calls]


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


def test_the_process_with_the_least_room_decides_for_all(model, monkeypatch):
    _, peak = needs(model, num_shards=2)
    config = config_of(model, gradient_checkpointing=None)
    assert chosen_by_two(config, [2**50, peak - 8], monkeypatch) == [True, True]
    assert chosen_by_two(config, [2**50, peak + 8], monkeypatch) == [False, False]


def test_processes_of_one_machine_share_its_memory(memory):
    memory(2**40)
    assert memory_share.memory_share(2) == 2**39


def test_each_stage_is_compared_with_the_memory_of_its_own_process(tmp_path, monkeypatch):
    """Of eight layers, one and the embedding fit where seven do not."""
    model = save_tiny("qwen3", tmp_path, num_hidden_layers=8)
    parallel = {"pipeline": 2, "layers_per_stage": [1, 7]}
    config = config_of(model, processes=2, parallel=parallel, gradient_checkpointing=None)
    shape = read_shape(model)
    mode = training_mode(config, num_shards=1, is_half=False, is_on_cpus=True)
    stages = shape.stage(1, is_first=True, is_last=False), shape.stage(7, is_first=False, is_last=True)
    held = [held_bytes(stage, mode) for stage in stages]
    peaks = [
        sum(needed(stage, mode) for needed in (held_bytes, published_bytes, working_bytes)) / USABLE for stage in stages
    ]
    assert peaks[0] < peaks[1] / 2
    assert chosen_by_two(config, [peaks[0] + 8, peaks[1] + 8], monkeypatch, num_stages=2) == [False, False]
    assert chosen_by_two(config, [peaks[0] + 8, peaks[1] - 8], monkeypatch, num_stages=2) == [True, True]
    assert chosen_by_two(config, [peaks[0] - 8, peaks[1] + 8], monkeypatch, num_stages=2) == [True, True]
    lines = chosen_by_two(config, [2**50, held[1] - 8], monkeypatch, num_stages=2)
    assert lines[0] == lines[1]
    assert "a process of 2 needs" in lines[0]


def test_what_cannot_be_held_is_refused_before_the_model_is_loaded(model, memory):
    held, _ = needs(model)
    memory(held - 8)
    with pytest.raises(BackendError, match=r"a process of 1 needs 0.0 GB .* more machines, or train an adapter"):
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
