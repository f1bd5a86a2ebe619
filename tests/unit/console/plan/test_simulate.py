import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from console.cli import app
from tests.helpers.plans.problems import INSTANCES

TINY = str(INSTANCES / "tiny_02.json")


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    plan = {"gen": [{"node": "h20-0", "tp": 1, "count": 8}], "train": [{"node": "h800-0", "gpus": 8}]}
    path.write_text(json.dumps({"rm1_plan": plan, "samples_per_second": 1.0}))
    return str(path)


def simulate(*arguments):
    return CliRunner().invoke(app, ["simulate", TINY, *arguments])


def test_programs_get_a_run_and_its_books(plan_file):
    result = simulate("--plan", plan_file, "--steps", "4", "--json")
    found = json.loads(result.output)

    assert (found["cost_model"], found["mode"], found["num_steps"]) == ("calibrated", "async", 4)
    assert found["audit"]["is_balanced"]
    assert found["samples_per_second"] > 0


def test_people_get_lines_and_a_picture(plan_file, tmp_path):
    picture = tmp_path / "timeline.svg"
    result = simulate("--plan", plan_file, "--mode", "streaming", "--steps", "4", "--picture", str(picture))

    assert result.exit_code == 0, result.output
    for words in ("samples/s", "idle: generation", "groups: "):
        assert words in result.output
    drawn = ElementTree.parse(picture).getroot()
    assert len([each for each in drawn.iter() if each.tag.endswith("rect")]) >= 4
    assert len(next(each for each in drawn.iter() if each.tag.endswith("polygon")).get("points").split()) > 50


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--mode", "fast"], "--mode: 'fast' is unknown"),
        (["--cost-model", "rm2"], "--cost-model: 'rm2' is unknown"),
        (["--fail", "h20-0"], "--fail: 'h20-0' is not MACHINE@SECONDS"),
        (["--slow", "h20-0@5"], "--slow: 'h20-0@5' is not MACHINE@SECONDS:FACTOR"),
        (["--fail", "nobody@5"], "no generator runs on 'nobody'"),
        (["--fail", "h20-0@50"], "nothing goes on"),
    ],
)
def test_a_mistake_is_reported_in_a_line(plan_file, arguments, told):
    result = simulate("--plan", plan_file, *arguments)

    assert result.exit_code == 2
    assert told in result.stderr
