"""One sample followed through spans and logs, of folders that are whole, cut and hostile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from console.inspect.sample_log import sample_log_command
from penstock import tracing
from penstock.config import ConfigError
from penstock.tracing.recording import Event, Span
from tests.helpers.traces import tracing_to

AT_S = 1_790_000_000.0
"""2026-09-21T14:13:20Z."""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {id: r1}\ntracing: {ratio: 0.25}\n")
    (tmp_path / "logs").mkdir()
    return tmp_path


def span(name, start_s, **changes):
    return Span(name=name, run_id="r1", start_s=AT_S + start_s, end_s=AT_S + start_s + 1, **changes)


def test_a_sample_is_followed_through_every_service_in_order(folder, capsys):
    group = tracing.group_context("r1", "0-7")
    sample, other = tracing.sample_context(group, 3, 0), tracing.sample_context(group, 4, 0)
    events = [Event(name="chunk", at_s=AT_S + 2.5, attributes={"rl.policy.version": 9})]
    with tracing_to(folder, ratio=1.0):
        # Children first: a generator writes its lease before the broker writes the sample.
        lease = tracing.group_context("r1", "a lease")
        lease = replace(lease, trace_id=group.trace_id)
        tracing.record(span("rl.sample.generate", 2, context=lease, parent=sample, events=events))
        tracing.record(span("rl.sample.generate", 2, parent=other))
        batch = tracing.group_context("r1", "a batch")
        tracing.record(span("rl.reward.score", 4, context=batch, links=[other, sample]))
        tracing.record(span("rl.reference.score", 5, links=[sample]))
        tracing.record(span("rl.environment.step", 2.2, parent=lease, attributes={"rl.turn": 0}))
        step, next_step = (tracing.step_context("r1", version, 0) for version in (1, 2))
        for each in (step, next_step):
            tracing.record(span("rl.critic.step", 6.1, parent=each))
            tracing.record(span("rl.train.compute", 6.1, parent=each))
        tracing.record(span("rl.train.step", 6, context=step, links=[sample]))
        tracing.record(span("rl.train.step", 6, context=next_step, links=[other]))
        tracing.record(span("rl.group", 0, context=group))
        tracing.record(span("rl.sample", 0, context=sample, parent=group, attributes={"rl.sample.key": "0-7/3"}))
        tracing.record(span("rl.sample", 0, context=other, parent=group, error="reward_failed"))
    with (folder / "traces.jsonl").open("a") as file:
        file.write(f'{{"resourceSpans": [{group.trace_id:032x}\n{{"a": "{group.trace_id:032x}"}}\n')
    trace = f"{batch.trace_id:032x}"
    (folder / "logs" / "reward.log").write_text(
        '{"timestamp": "2026-09-21T14:13:24.500Z", "group_id": "0-7", "sample_index": 3, "event": "not\\u001b[2J"}\n'
        '{"timestamp": "2026-09-21T14:13:24.500Z", "group_id": "0-7", "sample_index": 4, "event": "of another"}\n'
        '{"group_id": "0-7", cut short\n'
        f'{{"timestamp": "2026-09-21T14:13:24.700Z", "event": "slow grader", "trace_id": "{trace}"}}\n'
    )
    (folder / "logs" / "generator-0.log.1").write_text(
        "2026-09-21T14:13:22.100Z [info ] sample dropped  group_id=0-7 reason=x sample_index=3 \x1b[31m\n"
        "2026-09-21T14:13:22.100Z [info ] sample dropped  group_id=0-7 reason=x sample_index=33\n"
        "2026-09-21T14:13:22.100Z [info ] sample dropped  group_id=0-77 reason=x sample_index=3\n"
    )
    (folder / "logs" / "trainer.log").write_text("2026-09-21T14:13:26.100Z [warning] cannot be read  group_id=0-7\n")
    assert sample_log_command(folder, "0-7/3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[1:4]) for line in lines] == [
        "test-0 rl.group 1.000",
        "test-0 rl.sample 1.000",
        "test-0 rl.sample.generate 1.000",
        "generator-0 2026-09-21T14:13:22.100Z [info",
        "test-0 rl.environment.step 1.000",
        "test-0 rl.sample.generate: chunk",
        "test-0 rl.reward.score 1.000",
        'reward {"timestamp": "2026-09-21T14:13:24.500Z",',
        'reward {"timestamp": "2026-09-21T14:13:24.700Z",',
        "test-0 rl.reference.score 1.000",
        "test-0 rl.train.step 1.000",
        "test-0 rl.critic.step 1.000",
        "trainer 2026-09-21T14:13:26.100Z [warning]",
    ]
    assert lines[5].endswith("policy.version=9")
    assert "\x1b" not in "".join(lines)


def test_a_sample_that_is_not_traced_is_reported_as_such(folder, capsys):
    assert sample_log_command(folder, "0-9/0") == 1
    assert "25 % of the groups are traced" in capsys.readouterr().out
    for wrong in ("0-9", "0-9/x", "/3", "0-9/-1", "0-9/99999999999"):
        with pytest.raises(ConfigError, match="--sample"):
            sample_log_command(folder, wrong)
    (folder / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match=r"config\.yaml: cannot be read"):
        sample_log_command(folder, "0-9/0")
