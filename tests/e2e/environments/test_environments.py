"""Whole runs over an environment: turns, masks and scores, with generators and the environment killed in the middle."""

import importlib.util
import json
import shutil

import pytest

from penstock.environments import Action, Task
from penstock.model.model_folder import FileTokenizer
from services.generator.environments.transcript import read_transcript
from tests.e2e.runs import assert_balanced, assert_logs_are_json, running, small_run
from tests.helpers.console import ROOT
from tests.helpers.traces import spans_in

pytestmark = [pytest.mark.e2e, pytest.mark.flaky(reruns=0), pytest.mark.timeout(600)]
NUM_STEPS = 6


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": "a1 b2=", "answer": str(number)}) for number in range(3, 90)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_no_session_dies_with_a_generator_or_the_environment(task, tmp_path, rows):
    shutil.copy(ROOT / "examples" / "environment_python" / "guess.py", tmp_path)
    document = small_run(
        task,
        tmp_path,
        run__num_steps=NUM_STEPS,
        run__num_eval_prompts=0,
        data__train=str(rows),
        data__eval=None,
        sampling__max_new_tokens=200,
        generator__count=2,
        policy__token_shards=2,
        tracing__ratio=0.5,
        log__format="json",
    )
    document |= {"environment": "guess:Guess", "record": True}
    with running(document, tmp_path) as run:
        for step, service in ((1, "environment"), (2, "generator-0"), (4, "environment")):
            run.wait_for_step(step)
            restarts = run.num_restarts(service)
            run.kill_generator_with_leases(0) if service == "generator-0" else run.kill(service)
            run.wait_for("a restart", lambda name=service, num=restarts: run.num_restarts(name) == num + 1)
        assert run.end() == 0, run.text
        summary = run.summary()
        lines = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert_balanced(summary, num_samples=NUM_STEPS * 8 * 4)
    assert_turns_are_traced(run.folder.path)
    assert_logs_are_json(run.folder.logs, "environment")
    # No sample was lost with a process, though leases were.
    assert summary["audit"]["dropped"] == {}
    assert any(line["num_leases"] > 1 for line in lines)
    assert len(lines) == NUM_STEPS * 8 * 4
    guess, tokenizer = load_guess(), FileTokenizer(task.model_dir)
    for line in lines:
        assert_follows_from_its_turns(line, guess(), tokenizer)


def assert_turns_are_traced(folder):
    """Each turn of a sampled sample stands below one of its leases; those of others leave nothing."""
    spans = spans_in(folder)
    leases = {each.span["spanId"]: each for each in spans if each.name == "rl.sample.generate"}
    turns = [each for each in spans if each.name == "rl.environment.step"]
    below = [each for each in turns if each.span["parentSpanId"] in leases]
    for turn in below:
        group_id, index = leases[turn.span["parentSpanId"]].attributes["rl.sample.key"].split("/")
        assert f"/{group_id}/{index}/" in turn.attributes["rl.session"]
    trained = {each.span["traceId"] for each in spans if each.name == "rl.group" and each.links}
    # The generator that was killed took what it had recorded in its last second with it.
    assert len(trained - {each.span["traceId"] for each in below}) <= 2 < len(trained)
    assert any(each.name == "rl.environment.work" for each in spans)


def load_guess():
    spec = importlib.util.spec_from_file_location("guess", ROOT / "examples" / "environment_python" / "guess.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Guess


def assert_follows_from_its_turns(line, environment, tokenizer):
    """Played again here, the recorded turns give the recorded answers, which are masked, and the recorded score."""
    transcript = read_transcript(line["token_ids"], bytes(line["loss_mask"]))
    assert transcript.opening == ()
    environment.reset(Task(answer=line["answer"]))
    rewards = []
    for number, turn in enumerate(transcript.turns):
        outcome = environment.step(Action(text=tokenizer.decode(turn.sampled), turn=number))
        rewards.append(outcome.reward)
        said = "" if outcome.is_done or not turn.given else outcome.messages[0].content
        assert tokenizer.decode(turn.given) == said
    assert rewards != []
    assert line["score"]["value"] == pytest.approx(sum(rewards))
    assert line["score"]["turn_values"] == pytest.approx(rewards)
    masked = [logprob for logprob, bit in zip(line["logprobs"], line["loss_mask"], strict=False) if not bit]
    assert set(masked) <= {0.0}
