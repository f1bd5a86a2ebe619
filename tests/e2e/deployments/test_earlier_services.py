"""Services of an earlier commit and of this one train one run together, as while it is upgraded."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID, assert_balanced, running, service, small_run, wait_for_listeners
from tests.helpers.console import ROOT
from tests.helpers.ports import free_addresses

EARLIER = os.environ.get("PENSTOCK_EARLIER", "1101086e")
"""The commit that is worked with: the last of 24 November 2026, of which `other_version.py` knows the messages."""
NUM_STEPS = 3
PARTS = ("broker", "scheduler", "trainer", "reward", "generator-0", "generator-1")


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(("git", "-C", str(ROOT), *arguments), capture_output=True, check=False)


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.grid,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        _git("rev-parse", "--verify", "--quiet", f"{EARLIER}^{{commit}}").returncode != 0,
        reason=f"no commit {EARLIER}: not a checkout with its history (git fetch --unshallow)",
    ),
]


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier commit's files."""
    folder = tmp_path_factory.mktemp("earlier")
    made = _git("archive", EARLIER)
    assert made.returncode == 0, made.stderr
    subprocess.run(("tar", "-x", "-C", str(folder)), input=made.stdout, check=True)
    return folder


def _settings(task: Prepared, folder: Path, at: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Of each part."""
    generator = {
        "site": "here",
        "run_id": RUN_ID,
        "broker": at["broker"],
        "weights": at["trainer"],
        "model_path": str(task.model_dir),
        "dtype": "float32",
        "engine": {"engine": "transformers", "max_concurrent_samples": 16, "num_threads": 1},
    }
    return {
        "broker": {"redis_url": "memory://", "scheduler": at["scheduler"]},
        "scheduler": {},
        "trainer": {"state_dir": None, "allowed_roots": [str(folder), str(task.model_dir.parent)]},
        "reward": {
            "run_id": RUN_ID,
            "broker": at["broker"],
            "tokenizer_path": str(task.model_dir),
            "reward": {"model": "exact_match"},
        },
        **{
            name: {**generator, "generator_id": name, "cache_dir": str(folder / name)}
            for name in ("generator-0", "generator-1")
        },
    }


@pytest.mark.parametrize("old", [{"broker", "generator-0"}, {"scheduler", "trainer", "reward", "generator-0"}])
def test_services_of_two_versions_train_a_run(task: Prepared, tmp_path: Path, earlier: Path, old: set[str]) -> None:
    """Of each two services that talk, either is the older one in one of the runs."""
    at = dict(zip(PARTS, free_addresses(len(PARTS)), strict=True))
    document = small_run(task, tmp_path, run__num_steps=NUM_STEPS, run__num_eval_prompts=4, sampling__max_new_tokens=32)
    with ExitStack() as stack:
        for name, settings in _settings(task, tmp_path, at).items():
            source = {"PYTHONPATH": str(earlier)} if name in old else {}
            whole = {"listen": at[name], **settings}
            stack.enter_context(service(name.partition("-")[0], whole, tmp_path, name=name, **source))
        wait_for_listeners(at.values())
        document["endpoints"] = {name: at[name] for name in ("broker", "scheduler", "reward", "trainer")}
        document["endpoints"]["generators"] = [at["generator-0"], at["generator-1"]]
        # The older one in both runs: a console sends all settings, and a trainer refuses those that it does not know.
        with running(document, tmp_path, PYTHONPATH=str(earlier)) as run:
            status = run.end()
            logs = {name: (tmp_path / f"{name}.log").read_text()[-3000:] for name in PARTS}
            assert status == 0, f"{run.text}\n{logs}"
            assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)
            assert {name for name in PARTS if "Traceback" in logs[name]} == set(), logs
