"""`penstock probe` on machines with recorded GPUs: what it makes of what its children answer.

The answers are made up, as no GPU is there to measure; `tests/contract/console/test_probe.py` runs the children.
"""

import json
import tempfile

import pytest

from console.probe import measurements
from console.probe.children import Outcome, run_children
from tests.helpers.console import penstock_in_process
from tests.helpers.recorded_gpus import A100, Card, install_nvidia_smi, uuid_of

PASSES = {"forward_tflops": 120.0, "forward_backward_tflops": 96.0}
GOOD = {"tflops": 240.0, "copied_GBps": 1500.0, "backend": "nccl", "bus_GBps": 200.0, "latency_us": 15.0, **PASSES}
GOOD |= {"host_link_GBps": 24.0, "host_copied_GBps": 40.0}


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Runs the command on a machine with these cards, whose children answer that; returns its result and file."""

    def run(cards, answers, *arguments, problem=""):
        calls = []

        def answered(worker, settings, **options):
            calls.append((worker, settings, options["environment"]))
            return Outcome(answers=tuple(answers[: len(settings)]), problem=problem)

        # Other tests probe this machine, too, and one at a time may.
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", install_nvidia_smi(tmp_path / "bin", cards))
        monkeypatch.setattr(measurements, "run_children", answered)
        result = penstock_in_process(
            "probe", "--name", "m", "--seconds", "0.05", "--skip", "disk", *arguments, cwd=tmp_path
        )
        path = tmp_path / "inventory" / "m.json"
        return result, json.loads(path.read_text()) if path.exists() else {}, calls

    return run


def test_gpus_are_measured_together_and_one_of_them_decodes(probe):
    decoded = {"model": "x", "params": 1e6, "layers": 2, "file_bytes": 2e6, "points": [{"batch": 1, "step_s": 0.01}]}
    faster = {**GOOD, "tflops": 260.0, **decoded}
    result, found, calls = probe([Card(name=A100)] * 2, [{**GOOD, **decoded}, faster])
    assert result.exit_code == 0, result.output
    assert found["accelerators"]["kind"] == "A100-40"
    assert (found["matrix_tflops_bf16"], found["memory_GBps"]) == (250.0, 1500.0)
    assert found["allreduce"] == {"backend": "nccl", "bus_GBps": 200.0, "latency_us": 15.0}
    assert found["passes"] == {"model": "widths of the probe", **PASSES}
    assert found["decode"]["weight_bytes"] == 2.0
    # Each GPU has a link of its own, and all share the machine's memory.
    assert (found["host_link_GBps"], found["host_memory_GBps"]) == (24.0, 80.0)
    (worker, settings, environment), (decoder, _, one) = calls
    assert (worker, decoder) == ("device_worker", "decode_worker")
    assert [(each["kind"], each["rank"], each["count"], each["sums"]) for each in settings] == [
        ("cuda", 0, 2, True),
        ("cuda", 1, 2, True),
    ]
    assert environment["CUDA_VISIBLE_DEVICES"] == f"{uuid_of(0)},{uuid_of(1)}"
    assert one["CUDA_VISIBLE_DEVICES"] == uuid_of(0)


def test_what_fails_is_absent_with_its_reason_and_the_exit_status_says_so(probe):
    said = "NCCL error: unhandled system error"
    unknown = {**GOOD, "passes_problem": "a mixture of experts"}
    del unknown["forward_backward_tflops"]
    result, found, _ = probe([Card(name=A100)] * 2, [unknown, unknown], "--skip", "decode")
    assert (result.exit_code, found["passes"], found["absent"]["passes"]) == (1, None, "a mixture of experts")
    partly = {key: GOOD[key] for key in ("tflops", "copied_GBps", "host_link_GBps", "host_copied_GBps")}
    skipped = ("--skip", "decode", "--skip", "passes")
    result, found, _ = probe([Card(name=A100)] * 2, [partly, partly], *skipped, problem=said)
    assert result.exit_code == 1
    assert found["matrix_tflops_bf16"] == 240.0
    left_out = dict.fromkeys(("disk", "decode", "passes"), "left out by --skip")
    assert found["absent"] == {**left_out, "allreduce": said}


def test_of_mig_instances_one_is_measured_for_all(probe):
    instances = Card(name=A100, instances=[("3g.20gb", 20096), ("3g.20gb", 20096)])
    result, found, calls = probe([instances], [GOOD], "--skip", "decode")
    assert result.exit_code == 0, result.output
    assert found["accelerators"]["count"] == 2
    assert found["absent"]["allreduce"] == "NCCL does not join MIG instances"
    assert found["absent"]["host"] == "MIG instances share the link of their GPU"
    ((_, settings, _),) = calls
    assert [(each["count"], each["sums"], each["host"]) for each in settings] == [(1, False, False)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--skip", "lunch"), "--skip: 'lunch' is none of allreduce, passes, disk, decode"),
        (("--model", "nowhere"), "--model: nowhere holds no config.json"),
        (("--site", "a b"), "--name and --site: site"),
        (("--with", "far"), "--with: 'far'"),
        (("--cpu-devices", "2"), "--cpu-devices: this machine has 1 GPUs"),
        (("--data", "recording.jsonl"), "--data: has no effect without --reward"),
        (("--reward", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_mistakes_are_reported_before_anything_is_measured(probe, arguments, said):
    result, found, calls = probe([Card()], [GOOD], *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert len(result.stderr.splitlines()) == 1
    assert (found, calls) == ({}, [])


@pytest.mark.parametrize(
    ("worker", "limit_s", "said"),
    [
        ("worker", 30.0, ""),
        ("not_there", 30.0, "No module named console.probe.not_there"),
        ("decode_worker", 0.0, "did not end within 0 s"),
    ],
)
def test_children_end_and_say_why(worker, limit_s, said):
    outcome = run_children(worker, [{}, {}], num_threads=1, environment={}, limit_s=limit_s)
    assert outcome.answers == ({}, {})
    assert outcome.problem.endswith(said)
    assert bool(outcome.problem) is bool(said)
