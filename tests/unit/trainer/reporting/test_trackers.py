"""Trackers get what metrics.jsonl gets, and none of them can harm a run."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.config import ConfigError
from services.trainer.reporting.metrics import JsonLines
from services.trainer.reporting.trackers import Trackers, open_trackers


class Recorder:
    """A tracker that remembers; it fails from version `breaks_at` on."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_closed = False
        self._breaks_at = breaks_at

    def log(self, numbers, policy_version):
        if self._breaks_at is not None and policy_version >= self._breaks_at:
            raise ConnectionError("gone")
        self.logged.append((policy_version, dict(numbers)))

    def close(self):
        self.is_closed = True


def opened(names, run_dir, **changes):
    settings = {"run_id": "r", "policy_version": 4, "document": {"run": {"seed": 1}}} | changes
    return open_trackers(names, run_dir, **settings)


def test_numbers_of_a_line_reach_the_file_and_every_tracker(tmp_path):
    first, second = Recorder(), Recorder()
    lines = JsonLines(tmp_path / "lines.jsonl", prefix="eval/")
    lines.trackers = Trackers({"a": first, "b": second})
    lines.append({"policy_version": 3, "time": 5.0, "sampled_accuracy": 0.5, "greedy_accuracy": None, "note": "x"})
    assert lines.read()[0]["sampled_accuracy"] == 0.5
    assert first.logged == second.logged == [(3, {"eval/sampled_accuracy": 0.5})]


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(tmp_path):
    broken, sound = Recorder(breaks_at=2), Recorder()
    trackers = Trackers({"broken": broken, "sound": sound})
    lines = JsonLines(tmp_path / "lines.jsonl")
    lines.trackers = trackers
    for version in (1, 2, 3):
        lines.append({"policy_version": version, "reward/mean": 0.5})
    assert [version for version, _ in broken.logged] == [1]
    assert [version for version, _ in sound.logged] == [1, 2, 3]
    assert len(lines.read()) == 3
    trackers.close()
    assert sound.is_closed
    assert not broken.is_closed


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboard"), ("wandb_offline", "wandb")])
def test_one_that_is_not_installed_is_refused_with_what_to_install(tmp_path, monkeypatch, name, package):
    # None makes an import fail as that of a package that is not there.
    for module in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"run.trackers: {name} cannot begin: pip install {package}"):
        opened([name], tmp_path)


def stand_in(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_tensorboard_forgets_the_steps_that_a_resumed_run_gave_up(tmp_path, monkeypatch):
    scalars, asked = [], {}

    def writer(directory, **settings):
        asked.update(settings, directory=directory)
        return SimpleNamespace(add_scalar=lambda *scalar: scalars.append(scalar), close=lambda: None)

    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=writer)
    opened(["tensorboard"], tmp_path).log({"reward/mean": 0.25}, policy_version=5)
    assert asked == {"directory": str(tmp_path / "tensorboard"), "purge_step": 5}
    assert scalars == [("reward/mean", 0.25, 5)]


@pytest.mark.parametrize(("name", "mode"), [("wandb", "online"), ("wandb_offline", "offline")])
def test_wandb_goes_on_in_the_run_of_the_same_id(tmp_path, monkeypatch, name, mode):
    asked, logged = {}, []
    run = SimpleNamespace(log=lambda numbers, step: logged.append((step, numbers)), finish=lambda: None)
    stand_in(monkeypatch, "wandb", init=lambda **settings: (asked.update(settings), run)[1], Settings=dict)
    opened([name], tmp_path).log({"reward/mean": 0.25}, policy_version=5)
    assert (asked["mode"], asked["id"], asked["resume"], asked["dir"]) == (mode, "r", "allow", str(tmp_path))
    assert asked["config"] == {"run": {"seed": 1}}
    assert logged == [(5, {"reward/mean": 0.25})]


def test_one_that_cannot_begin_is_refused_and_those_before_it_are_ended(tmp_path, monkeypatch):
    closed = []
    writer = SimpleNamespace(close=lambda: closed.append(True))
    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda *_, **__: writer)

    def no_key(**_):
        raise ValueError("no API key")

    stand_in(monkeypatch, "wandb", init=no_key, Settings=dict)
    with pytest.raises(ConfigError, match="wandb cannot begin: no API key"):
        opened(["tensorboard", "wandb"], tmp_path)
    assert closed == [True]


def test_no_key_goes_to_wandb_in_plain_text(tmp_path, monkeypatch):
    stand_in(monkeypatch, "wandb", init=lambda **_: SimpleNamespace(finish=lambda: None), Settings=dict)
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.example:8080")
    with pytest.raises(ConfigError, match=r"^run.trackers: WANDB_BASE_URL is http://wandb.example:8080.*use https"):
        opened(["wandb"], tmp_path)
    opened(["wandb_offline"], tmp_path)
    opened(["wandb"], tmp_path, allows_plain=True)
    for address in ("https://wandb.example", "http://127.0.0.1:8080", ""):
        monkeypatch.setenv("WANDB_BASE_URL", address)
        opened(["wandb"], tmp_path)
