import json
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from console.cli import app
from console.plan.plan_text import print_plan
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_report import report_of
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import read_problem
from services.scheduler.solvers.interface import Solution
from tests.helpers.console import ROOT
from tests.helpers.plans.problems import INSTANCES, document, problem
from tests.helpers.plans.problems import plan as candidate

EXAMPLE = str(ROOT / "examples" / "two_sites.yaml")
KEYS = [
    "problem",
    "cost_model",
    "solver",
    "solve_s",
    "num_evaluated",
    "is_feasible",
    "is_optimal",
    "reason",
    "samples_per_second",
    "upper_bound_samples_per_second",
    "gap",
]
FEASIBLE_KEYS = [
    "step_s",
    "tokens_per_second",
    "usd_per_hour",
    "usd_per_million_tokens",
    "limit",
    "bottleneck",
    "generation_idle",
    "training_idle",
    "training",
    "weights",
    "generation",
    "simulated_samples_per_second",
]
GENERATION_KEYS = ["node", "tp", "pp", "count", "batch", "decode_step_s", "samples_per_second", "duty"]
ADVICE_KEYS = ["next_purchases", "alternatives"]


def plan(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture(scope="module")
def answer():
    """The example's plan with all that there is to say of it, for programs.

    Advice is what the budget leaves over: a busy machine must not leave nothing.
    """
    return plan(EXAMPLE, "--json", "--budget-s", "120").output


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The same for people: what is said, and the picture."""
    drawn = tmp_path_factory.mktemp("plan") / "plan.svg"
    result = plan(EXAMPLE, "--explain", "--picture", str(drawn), "--budget-s", "120")
    assert result.exit_code == 0, result.output
    return result.output, drawn


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_is_planned_and_shown_to_people_in_words_and_in_a_picture(shown):
    output, drawn = shown
    for words in (
        "a100-0",
        "l40s-0 and 1 like it",
        "train, 8 of 8 GPUs",
        "samples/s",
        "an hour",
        "optimal",
        "by simulation:",
    ):
        assert words in output
    root = ElementTree.fromstring(drawn.read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    tips = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert {"a100-0 (A100-80)", "l40s-0 (L40S)", "l40s-1 (L40S)", "generation", "training"} <= set(texts)
    assert tips.count("train, 8 GPUs") == 2
    assert tips.count("generate, 1 GPUs") == 8


@pytest.mark.slow
def test_programs_get_the_plan_and_its_numbers():
    result = plan(str(INSTANCES / "tiny_02.json"), "--json")
    answer = json.loads(result.output)

    model = CostModel(read_problem(INSTANCES / "tiny_02.json"))
    score = model.score(PlanDocument.model_validate(answer["rm1_plan"]))
    assert answer["samples_per_second"] == pytest.approx(score.samples_per_second)
    assert answer["tokens_per_second"] == pytest.approx(score.samples_per_second * model.demand.completion_tokens)
    assert answer["usd_per_hour"] == pytest.approx(8 * 5.28 + 8 * 1.85)
    assert answer["usd_per_million_tokens"] == pytest.approx(
        answer["usd_per_hour"] / (answer["tokens_per_second"] * 3600 / 1e6)
    )
    assert 0.5 < answer["simulated_samples_per_second"] / answer["samples_per_second"] < 1.05
    assert answer["gap"] == 0
    assert answer["is_optimal"]
    assert answer["upper_bound_samples_per_second"] == answer["samples_per_second"]
    assert list(answer) == [*KEYS, "rm1_plan", *FEASIBLE_KEYS, *ADVICE_KEYS]
    assert all(list(each) == GENERATION_KEYS for each in answer["generation"])


def test_a_cluster_that_is_too_small_ends_with_status_1_and_the_reason(tmp_path):
    path = tmp_path / "large.json"
    path.write_text(json.dumps(document("tiny_04", "model.params=60e9")))

    told = plan(str(path))
    assert told.exit_code == 1
    assert "training needs 960 GB" in told.output
    answer = json.loads(plan(str(path), "--json").output)
    assert (answer["is_feasible"], answer["rm1_plan"]) == (False, None)
    assert list(answer) == [*KEYS, "rm1_plan", *ADVICE_KEYS]
    assert "training needs 960 GB" in answer["reason"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            [EXAMPLE, "--solver", "oracle"],
            "--solver: 'oracle' is unknown; choose one of auto, partition, streamrl, exhaustive, multilevel, milp",
        ),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["nowhere.json"], "nowhere.json: cannot be read"),
    ],
)
def test_mistakes_are_reported_in_a_line(arguments, told):
    result = plan(*arguments)

    assert result.exit_code == 2
    assert told in result.output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_bottleneck_the_next_purchase_and_cheaper_clusters_are_reported(answer, shown):
    output, _ = shown
    for words in (
        "bottleneck: training: computation",
        "more L40S in there: +",
        "fewer machines would bring:",
        "1 a100: ",
    ):
        assert words in output, output

    answer = json.loads(answer)
    costs = [each["usd_per_hour"] for each in answer["alternatives"]]
    rates = [each["samples_per_second"] for each in answer["alternatives"]]
    assert costs[0] <= answer["usd_per_hour"]
    assert costs == sorted(costs, reverse=True)
    assert rates == sorted(rates, reverse=True)
    assert all(each["gain"] > 0 for each in answer["next_purchases"])


def test_each_kind_of_replica_of_a_machine_is_explained(capsys):
    model = CostModel(problem("tiny_02"))
    mixed = candidate([("h20-0", 1, 4), ("h20-0", 2, 2)], [("h800-0", 8)])
    solution = Solution(mixed, model.score(mixed), None, False, 1, "by hand")

    print_plan(report_of(model, solution, solve_s=0.0), is_explained=True)
    output = capsys.readouterr().out
    for degree in (1, 2):
        batch = model.replica(model.nodes["h20-0"], degree).batch
        assert f"h20, tensor parallel {degree}: {batch} sequences" in output, output


def test_rates_of_offload_that_nobody_measured_are_told(capsys):
    settings = ("model.ffn=12288", "cost_model.train_pack_tokens=4096", "cost_model.host_link_GBps=24")
    nodes = "nodes=[{name: a100, gpu: A100-80, gpus: 2, memory_GB: 500}, {name: l4, gpu: L4, gpus: 4}]"
    model = CostModel(problem("tiny_04", *settings, nodes, "links=[]"))
    offloading = candidate([("l4-0", 4, 1)], [("a100-0", 2)]).model_copy(update={"mesh": Mesh(offload=True)})
    solution = Solution(offloading, model.score(offloading), None, False, 1, "by hand")

    print_plan(report_of(model, solution, solve_s=0.0), is_explained=True)
    output = capsys.readouterr().out
    assert "24.0 GB/s between a GPU and its machine's memory (stated)" in output, output
    assert "100.0 GB/s in it (assumed; penstock probe measures it: cost_model.host_memory_GBps)" in output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_running_plan_is_where_the_search_begins(answer, tmp_path):
    running = tmp_path / "running.json"
    running.write_text(answer)
    begun = json.loads(plan(EXAMPLE, "--json", "--solver", "partition", "--start", str(running)).output)

    assert begun["rm1_plan"] == json.loads(running.read_text())["rm1_plan"]
    told = plan(EXAMPLE, "--start", EXAMPLE)
    assert told.exit_code == 2
    assert "two_sites.yaml" in told.output


def test_a_plan_of_other_machines_is_not_deployed_and_a_region_without_a_link_is_named(tmp_path):
    path = tmp_path / "problem.json"
    path.write_text(json.dumps({**document("tiny_04"), "links": []}))
    other = tmp_path / "other.json"
    other.write_text(candidate([("l4-0", 1, 4)], [("h800-7", 8)]).model_dump_json())
    begun = (str(path), "--solver", "partition", "--budget-s", "2", "--start", str(other))
    refused = plan(*begun, "--deploy", str(tmp_path / "out"))
    assert refused.exit_code == 2, refused.output
    lines = refused.stderr.splitlines()
    assert [line.split(",")[0] for line in lines[:2]] == [
        f"note: no link joins region '{region}' with another" for region in ("r0", "r1")
    ]
    assert lines[2:] == [
        f"penstock: --start: {other}: train.0.node: there is no machine 'h800-7', so what --deploy wrote would be "
        "another plan; leave --start out, or plan for the machines that it names"
    ]
    assert not (tmp_path / "out").exists()
    assert "the plan is made without it" in plan(*begun).stderr
