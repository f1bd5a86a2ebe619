"""How a run fits the memory of its processes' devices: activations computed again, or refused."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from penstock.model.model_shape import read_shape
from penstock.model.training_memory import held_bytes, offloaded_bytes, published_bytes, working_bytes
from services.trainer.config import TrainingConfig
from services.trainer.distributed import memory_share
from services.trainer.model.backend import BackendError
from services.trainer.model.ranks import Ranks
from services.trainer.run import memory_fit
from services.trainer.run.memory_fit import USABLE, fit_memory, training_mode
from services.trainer.run.policy_loading import local_backend
from tests.helpers.models.model_families import save_tiny
from tests.helpers.trainers.two_processes import config_of


class Pair(Ranks):
    """One of two processes, each a thread here, with so much memory of its own."""

    num_ranks = 2

    def __init__(self, meeting, memory, *, rank, num_stages=1, device="cpu"):
        self._device, self._meeting, self.memory, self.rank = torch.device(device), meeting, memory, rank
        self.num_stages, self.num_shards, self.stage_index = num_stages, 2 // num_stages, rank % num_stages

    def device(self, name):
        return self._device

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
    """Whether both processes compute activations again, or why they cannot train."""
    found = fits_of_two(config, memories, monkeypatch, **details)
    return [each if isinstance(each, str) else each.recomputes for each in found]


def fits_of_two(config, memories, monkeypatch, **details):
    """What both processes say."""
    monkeypatch.setattr(memory_fit, "_device_bytes", lambda _device, ranks: int(ranks.memory))
    meeting = Meeting()
    pair = [Pair(meeting, memory, rank=rank, **details) for rank, memory in enumerate(memories)]
    with ThreadPoolExecutor(2) as threads:
        calls = [threads.submit(fit_memory, config, ranks) for ranks in pair]
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
    mode = training_mode(config_of(model), shape, num_shards=num_shards, is_half=False, is_on_cpus=True)
    held = held_bytes(shape, mode)
    return held, (held + published_bytes(shape, mode) + working_bytes(shape, mode)) / USABLE


def chosen(model, ranks=None, given=None):
    config = config_of(model, gradient_checkpointing=given)
    with capture_logs() as logs:
        return fit_memory(config, ranks or Ranks()).recomputes, logs


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
    mode = training_mode(config, shape, num_shards=1, is_half=False, is_on_cpus=True)
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


def test_offload_is_chosen_where_checkpointing_does_not_suffice_and_the_machine_has_room(tmp_path, memory, monkeypatch):
    """At so few tokens that most of it is the state."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    model = save_tiny("qwen3", tmp_path, hidden_size=128, intermediate_size=384, num_hidden_layers=8, **heads)
    config = config_of(model, device="auto", gradient_checkpointing=None)
    sizes = {
        "trainer": {"tokens_per_pack": 32},
        "data": {"max_prompt_tokens": 16},
        "sampling": {"max_new_tokens": 48},
    }
    config = config.model_copy(
        update={name: getattr(config, name).model_copy(update=changes) for name, changes in sizes.items()}
    )
    shape = read_shape(model)
    kept = training_mode(config, shape, num_shards=2, is_half=False, is_on_cpus=False)
    on_machine = offloaded_bytes(shape, replace(kept, offloads=True)) + published_bytes(shape, kept)
    assert on_machine == held_bytes(shape, kept) + published_bytes(shape, kept)

    def peak(**changes):
        mode = replace(kept, **changes)
        return (held_bytes(shape, mode) + working_bytes(shape, mode)) / USABLE + 8

    def found(gpu, machine=2**40, **changes):
        memory(2 * machine)
        settings = config.trainer.model_copy(update=changes)
        given = config.model_copy(update={"trainer": settings})
        fits = fits_of_two(given, [2**50, gpu], monkeypatch, device="cuda")
        assert fits[0] == fits[1]
        return fits[0] if isinstance(fits[0], str) else (fits[0].recomputes, fits[0].offloads)

    assert found(peak()) == (False, False)
    assert found(peak(checkpoints_layers=True)) == (True, False)
    assert found(peak(offloads=True)) == (False, True)
    assert found(peak(checkpoints_layers=True, offloads=True)) == (True, True)
    # A setting decides, and without room in the machine there is nothing to choose.
    assert found(peak(), offload=True) == (False, True)
    holds = held_bytes(shape, kept) + 8
    assert found(holds, offload=False, gradient_checkpointing=False) == (False, False)
    assert found(holds, machine=on_machine / USABLE - 8) == (True, False)
    too_small = held_bytes(shape, kept) - 8
    assert found(too_small, machine=on_machine / USABLE + 8) == (False, True)
    refusal = found(too_small, machine=on_machine / USABLE - 8)
    assert "a process of 2 needs" in refusal
    assert "raise trainer.processes, or its machine's memory: trainer.offload needs" in refusal
    assert "of its machine's memory to hold" in found(2**50, machine=on_machine / USABLE - 8, offload=True)


def test_offload_is_refused_where_it_moves_nothing_or_is_not_supported(model, memory):
    def config(**changes):
        given = config_of(model, device="auto").model_dump()
        given["trainer"] |= {"offload": True} | changes.pop("trainer", {})
        return TrainingConfig.model_validate(given | changes)

    with pytest.raises(BackendError, match=r"trainer\.offload: true, and this trainer computes on CPUs"):
        fit_memory(config(), Pair(None, 2**50, rank=0))
    for changes, reason in (
        ({"trainer": {"device": "cpu"}}, "with trainer.device cpu, where there is nothing to move"),
        ({"trainer": {"processes": 1}}, "with one process, whose weights FSDP does not shard"),
        ({"trainer": {"parallel": {"pipeline": 2}}}, "with trainer.parallel.pipeline"),
        ({"lora": {"rank": 4}}, "with lora"),
    ):
        with pytest.raises(ValidationError, match=f"trainer.offload: true is not supported {reason}"):
            config(**changes)


def test_what_cannot_be_held_is_refused_before_the_model_is_loaded(model, memory):
    held, _ = needs(model)
    memory(held - 8)
    with pytest.raises(BackendError, match=r"a process of 1 needs 0.0 GB .* more machines, or train an adapter"):
        local_backend(config_of(model, gradient_checkpointing=None))
    # An adapter's base is a quarter of that.
    fit_memory(config_of(model, lora=True), Ranks())


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
