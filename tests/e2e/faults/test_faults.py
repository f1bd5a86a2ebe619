"""Services killed in the middle of a run, the staleness bound all the while, and an interrupted run that goes on."""

import signal

import pytest

from tests.e2e.runs import RUN_ID, assert_balanced, assert_within_bound, penstock, running, small_run

pytestmark = [pytest.mark.e2e, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]


def test_killed_services_come_back_and_the_audit_balances(task, tmp_path):
    document = small_run(task, tmp_path, run__num_steps=12, generator__count=2, policy__token_shards=3)
    with running(document, tmp_path) as run:
        for step, service in ((1, "broker"), (3, "generator-0"), (5, "reward"), (7, "scheduler")):
            run.wait_for_step(step)
            run.kill(service)
            run.wait_for(f"a restart of {service}", lambda name=service: run.num_restarts(name) == 1)
        assert run.end() == 0, run.text
        summary = run.summary()

    assert_balanced(summary, num_samples=12 * 8 * 4)
    assert_within_bound(run, 1)
    assert {name: summary["restarts"][name] for name in ("broker", "generator-0", "reward", "scheduler")} == {
        "broker": 1,
        "generator-0": 1,
        "reward": 1,
        "scheduler": 1,
    }


def test_an_interrupted_run_goes_on_where_it_stopped(task, tmp_path):
    with running(small_run(task, tmp_path, run__num_steps=8), tmp_path) as run:
        run.wait_for_step(3)
        run.process.send_signal(signal.SIGINT)
        assert run.end(timeout_s=60) == 130, run.text
        done = run.num_steps
        assert 3 <= done < 8
        assert (run.folder.checkpoints / f"step_{done}").is_dir()

    run_dir = tmp_path / "runs" / RUN_ID
    with penstock("run", "--resume", str(run_dir), cwd=tmp_path, run_dir=run_dir) as run:
        assert run.end() == 0, run.text
        summary, metrics = run.summary(), run.metrics()

    assert [step["policy_version"] for step in metrics] == list(range(1, 9))
    assert summary["steps"] == 8
    assert_balanced(summary, num_samples=8 * 8 * 4)
