"""Which cores engines have for themselves, and that processes keep to them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from console.config.config import RunConfig
from console.launch.cpu_pinning import Cores

STARTS_A_CHILD = (
    "import subprocess, sys, threading, time; "
    "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); "
    "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)']); "
    "print(child.pid, flush=True); "
    "time.sleep(60)"
)


def cores(folder: Path, usable=range(4), *, engines=("generator-0", "generator-1"), num_threads=1, num_others=2):
    return Cores(usable, engines=engines, num_threads=num_threads, num_others=num_others, folder=folder / "cores")


def test_each_engine_has_as_many_as_it_has_threads_and_all_others_have_the_rest(tmp_path):
    shared_out = cores(tmp_path, range(2, 8), num_threads=2)
    assert shared_out.of_others == {2, 3}
    assert shared_out.of_engine == {"generator-0": {4, 5}, "generator-1": {6, 7}}
    shared_out.release()


@pytest.mark.parametrize("changes", [{"num_others": 3}, {"num_threads": 2}, {"usable": ()}, {"engines": ()}])
def test_nothing_is_bound_where_the_cores_are_too_few(tmp_path, changes):
    assert cores(tmp_path, **changes).of_engine == {}


def test_an_engine_of_another_run_keeps_its_core(tmp_path):
    first = cores(tmp_path, engines=["generator-0"])
    second = cores(tmp_path, engines=["generator-0"])
    assert first.of_engine == {"generator-0": {3}}
    assert second.of_engine == {"generator-0": {2}}
    assert second.of_others == {0, 1}
    assert cores(tmp_path, engines=["generator-0"]).of_engine == {}
    first.release()
    third = cores(tmp_path, engines=["generator-0"])
    assert third.of_engine == {"generator-0": {3}}
    second.release()
    third.release()


def test_where_claims_cannot_be_noted_nothing_is_bound(tmp_path):
    (tmp_path / "cores").write_text("a file in the folder's place")
    assert cores(tmp_path).of_engine == {}


@pytest.mark.parametrize(
    ("engine", "is_for_cpus", "num_bound"), [("vllm", True, 1), ("vllm", False, 0), ("transformers", True, 0)]
)
def test_only_engines_that_decode_on_cpus_have_cores_of_their_own(
    tmp_path, monkeypatch, engine, is_for_cpus, num_bound
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4, 5, 6}, raising=False)
    version = "1.0" if is_for_cpus else None
    monkeypatch.setattr("services.generator.engines.vllm.config.installed_version", lambda _package: version)
    document = {"model": {"path": "none"}, "data": {"train": "none"}, "generator": {"engine": engine}}
    shared_out = Cores.of_run(RunConfig.model_validate(document), num_generators=1)
    assert shared_out.of_engine == ({"generator-0": {6}} if num_bound else {})
    shared_out.release()


def test_each_worker_of_an_engine_has_cores_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setattr("services.generator.engines.vllm.config.installed_version", lambda _package: "1.0")
    generator = {"engine": "vllm", "tensor_parallel": 2, "pipeline_parallel": 3}
    document = {"model": {"path": "none"}, "data": {"train": "none"}, "generator": generator}
    shared_out = Cores.of_run(RunConfig.model_validate(document), num_generators=1)
    assert shared_out.of_engine == {"generator-0": {2, 3, 4, 5, 6, 7}}
    shared_out.release()


def affinities(pid: int) -> set[frozenset[int]]:
    return {frozenset(os.sched_getaffinity(int(thread))) for thread in os.listdir(f"/proc/{pid}/task")}


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="takes two cores to tell apart"
)
def test_a_generator_leaves_its_core_to_what_it_started(tmp_path):
    *others, own = sorted(os.sched_getaffinity(0))
    shared_out = cores(tmp_path, {*others, own}, engines=["generator-0"], num_others=1)
    with subprocess.Popen((sys.executable, "-S", "-c", STARTS_A_CHILD), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            shared_out.bind("generator-0", process.pid)
            assert affinities(child) == {frozenset({own})}
            assert affinities(process.pid) == {frozenset(others)}
            assert len(os.listdir(f"/proc/{process.pid}/task")) == 2
            shared_out.bind("trainer", process.pid)
            assert affinities(child) == affinities(process.pid) == {frozenset(others)}
        finally:
            os.kill(child, 9)
            process.kill()
    shared_out.bind("trainer", process.pid)
    shared_out.release()
