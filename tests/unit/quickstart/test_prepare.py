"""The quick start's cache, with a warm start of a few steps."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from quickstart.prepare import Prepared, PrepareSettings, prepare
from quickstart.warm_start import AccuracyBand, WarmStartSettings

pytestmark = pytest.mark.slow

ANY_ACCURACY = AccuracyBand(min_sampled=0.0, max_sampled=1.0, min_greedy=0.0)
QUICK = PrepareSettings(
    num_train_problems=64,
    num_eval_problems=4,
    warm_start=WarmStartSettings(
        max_batch_tokens=256,
        num_curriculum_steps=2,
        num_decay_steps=2,
        max_steps=2,
        check_every_steps=1,
        band=ANY_ACCURACY,
    ),
)


def prepare_quick(directory: Path, *, seed: int = 0, settings: PrepareSettings = QUICK) -> tuple[Prepared, list[str]]:
    """Prepare with few steps; returns the files and the progress lines."""
    lines: list[str] = []
    return prepare(directory, seed=seed, settings=settings, on_progress=lines.append), lines


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder in which the quick start was prepared once, and the progress lines of that."""
    folder = tmp_path_factory.mktemp("prepared")
    _, lines = prepare_quick(folder)
    return folder, lines


@pytest.fixture
def prepared(made: tuple[Path, list[str]], tmp_path: Path) -> Prepared:
    """The same in a folder of the test's own."""
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    return prepare_quick(tmp_path)[0]


def contents(prepared: Prepared) -> list[bytes]:
    """What training depends on, byte for byte."""
    weights = prepared.model_dir / "model.safetensors"
    return [path.read_bytes() for path in (weights, prepared.train_path, prepared.eval_path)]


def test_same_seed_gives_the_same_model_and_data(prepared: Prepared, tmp_path: Path) -> None:
    second, _ = prepare_quick(tmp_path / "two")
    other, _ = prepare_quick(tmp_path / "two", seed=1)
    assert contents(prepared) == contents(second)
    assert all(a != b for a, b in zip(contents(second), contents(other), strict=True))


def test_second_call_reuses_what_the_first_made(made: tuple[Path, list[str]], tmp_path: Path) -> None:
    shutil.copytree(made[0], tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again, lines = prepare_quick(tmp_path)
    assert again.train_path in before
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert len(lines) == 1 < len(made[1])


def test_folder_without_its_marker_is_rebuilt(prepared: Prepared, tmp_path: Path) -> None:
    before = contents(prepared)
    (prepared.train_path.parent / "prepared.json").unlink()
    prepared.train_path.write_text("cut sho", encoding="utf-8")
    again, _ = prepare_quick(tmp_path)
    assert contents(again) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [prepared.train_path.parent.name]


def test_other_settings_are_prepared_beside_the_first(prepared: Prepared, tmp_path: Path) -> None:
    other, _ = prepare_quick(tmp_path, settings=replace(QUICK, num_train_problems=65))
    assert other.train_path.parent != prepared.train_path.parent
    assert len(other.train_path.read_text(encoding="utf-8").splitlines()) == 65
    assert len(prepared.train_path.read_text(encoding="utf-8").splitlines()) == 64


def test_marker_tells_how_the_warm_start_ended(made: tuple[Path, list[str]]) -> None:
    (marker_path,) = made[0].glob("*/prepared.json")
    marker = json.loads(marker_path.read_text(encoding="utf-8"))
    # Any accuracy satisfies the band of these settings, so the first measurement ends the warm start.
    assert marker["num_steps"] == 2
    assert marker["is_in_band"] is True
    assert "done after 2 steps" in made[1][-1]
