"""Plans of drawn clusters are carried out at toy size: they start, train two steps, and stand as they were planned.

GPUs are emulated, the trainer's processes are on CPUs; each sample is a session with an environment that the head
serves. Starts are expensive: the suite carries out one plan of each kind of mesh, `make plans PLANS=20` twenty.
"""

import json
import os
import re
import shutil
from collections import Counter

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from console.deploy.deployment import write_deployment
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_message import document_of
from services.scheduler.planning.solve import solve
from services.scheduler.problem.plan_document import Broker, node_classes
from services.scheduler.service_placement.service_places import with_center, with_relays
from tests.e2e.runs import assert_balanced, penstock
from tests.helpers.console import ROOT, write_rows
from tests.helpers.models.tiny_model import make_tiny_mixture, make_tiny_model
from tests.helpers.plans.drawn_clusters import STEPS, clusters, run_of
from tests.helpers.plans.free_ports import move_ports

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.flaky(reruns=0), pytest.mark.timeout(3600)]

NUM_PLANS = int(os.environ.get("PENSTOCK_DRAWN_PLANS", "1"))
PLACE = re.compile(r"process in its place.*")
GENERATOR = re.compile(r"generator in its place.*")
SCORING = re.compile(r"(scorer|reward|critic) listens")


def regions(problem):
    """Of each machine."""
    return {name: node.region for name, node in node_classes(problem).items()}


def is_at(entry, home) -> bool:
    """Whether an entry's machines may have a reward worker: those without GPUs beside the head only."""
    return hasattr(entry, "gpus") or entry.region == home


def kind_of(plan) -> str:
    if plan.mesh is None:
        return "one copy"
    return "experts" if plan.mesh.expert > 1 else "pipeline" if plan.mesh.pipeline > 1 else "islands"


def places(log: str) -> dict[int, dict[str, str]]:
    """What each process of the trainer says of itself, by rank."""
    found = [dict(re.findall(r"(\w+)='?([^'\s]+(?: of \d+)?)", line)) for line in PLACE.findall(log)]
    return {int(each["rank"]): each for each in found}


def generators(logs):
    """Replicas, degrees and batch of every generator process, by what it says of itself."""
    found = Counter()
    for log in logs:
        for line in GENERATOR.findall(log.read_text()):
            said = dict(re.findall(r"(\w+)=(\d+)", line))
            layout = (int(said["tensor_parallel"]), int(said["pipeline_parallel"]))
            found[log.parent.parent.name, *layout, int(said["max_concurrent_samples"])] += 1
    return found


def scoring(machines):
    """Machine and kind of every process that scores."""
    found = Counter()
    for log in machines.glob("*/logs/*.log"):
        for kind in SCORING.findall(log.read_text()):
            found[log.parent.parent.name, kind] += 1
    return found


def relaying(logs):
    """Whether each machine's generators leave the link to others, by site: those that say how long they wait."""
    found = {}
    for log in logs:
        for line in GENERATOR.findall(log.read_text()):
            said = dict(re.findall(r"(\w+)='?([^'\s]+)", line))
            if (site := said.get("site")) in ("home", "far"):
                found[site, log.parent.parent.name] = float(said["relay_patience_s"]) > 0
    return found


def centers(machines, run):
    """The machine of Redis, broker and scheduler, by whose folder has their logs; None is the run's own."""
    folders = {each.name: each / "logs" for each in machines.iterdir()} | {None: run.log_of("trainer").parent}
    services = ("redis", "broker", "broker-1", "scheduler")
    return {(kind, name) for name, logs in folders.items() for kind in services if (logs / f"{kind}.log").exists()}


def carry_out(problem, plan, model_dir, folder):
    """Deploy and run a plan; the plan that it followed, and where its processes stood."""
    data = write_rows(folder / "train.jsonl", *({"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)))
    written = folder / "out"
    run = run_of(model_dir, data, folder)
    # The environment that the head serves is reached by the generators of every machine.
    shutil.copy(ROOT / "examples" / "environment_python" / "guess.py", folder)
    run |= {"environment": "guess:Guess", "record": True}
    write_deployment(written, CostModel(problem), plan, run=run, address="127.0.0.1")
    move_ports(written)
    with penstock("run", str(written / "run.yaml"), cwd=folder, run_dir=folder / "runs" / "drawn") as run:
        assert run.end() == 0, run.text
        log = run.folder.log_of("trainer").read_text()
        followed = json.loads(run.folder.plans.read_text().splitlines()[0])
        assert len(run.folder.plans.read_text().splitlines()) == 1
        assert not SCORING.findall(run.text), "the run starts no reward worker and no scorer of its own"
        assert not run.folder.log_of("reward").exists() or plan.train[0].node in plan.reward
        assert_balanced(run.summary(), num_samples=STEPS * 24)
        assert len(run.metrics()) == STEPS
        assert all(("loss/value_loss" in line) is (plan.critic is not None) for line in run.metrics())
        machines, head = written / "machines", plan.train[0].node
        stands = {kind: None if name == head else name for kind, name in plan.center.items()}
        more = {("redis", stands["broker"]), *([("broker-1", stands["broker"])] if plan.broker.count > 1 else [])}
        assert centers(machines, run.folder) == {*stands.items(), *more}
        lines = [json.loads(line) for line in (run.folder.path / "trajectories.jsonl").read_text().splitlines()]
    assert {line["score"]["model"] for line in lines} == {"guess"}
    assert any(len(line["score"]["turn_values"]) > 1 for line in lines)
    followed = document_of(ParseDict(followed, pb.Plan()))
    relays = {each.site: each.node for each in plan.relay}
    far = {each.node for each in followed.gen if regions(problem)[each.node] in relays}
    assert relaying(machines.glob("*/logs/gen-*.log")) == {
        (regions(problem)[name], name): name != relays[regions(problem)[name]] for name in far
    }
    assert generators(machines.glob("*/logs/gen-*.log")) == Counter(
        {(each.node, each.tp, each.pp, each.batch): each.count for each in followed.gen}
    )
    assert scoring(machines) == Counter(
        {(each.node, "scorer"): each.gpus for each in plan.score}
        | {(name, "reward"): 1 for name in plan.reward if name != plan.train[0].node}
        | ({} if plan.critic is None else {(plan.critic.node, "critic"): 1})
    )
    return followed, places(log)


AGAIN = [pytest.param(kind, marks=pytest.mark.grid) for kind in ("pipeline", "experts")]


@pytest.mark.parametrize("kind", ["islands", *AGAIN])
def test_a_drawn_plan_runs_as_it_is_planned(kind, tmp_path):
    make = make_tiny_mixture if kind == "experts" else make_tiny_model
    model_dir = make(tmp_path / "model", num_layers=4)
    carried_out = Counter()

    @settings(
        max_examples=200 * NUM_PLANS,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        clusters(
            model_dir,
            has_wide_weights=kind == "pipeline",
            has_critic=kind == "islands",
            has_slow_rewards=kind == "islands",
        ),
        st.integers(0, 3),
    )
    def run_one(problem, seed):
        if carried_out.total() >= NUM_PLANS:
            return
        solution = solve(CostModel(problem), "auto", time_left=lambda: 1.0, seed=seed)
        assume(solution.plan is not None)
        plan = solution.plan
        assume(kind_of(plan) == kind)
        if kind == "pipeline":
            assume(plan.score)
            assert all(each.pp > 1 or each.tp > 1 for each in plan.gen)
        if kind == "islands":
            home = regions(problem)[plan.train[0].node]
            machines = {each.machine(0) for each in (*problem.nodes, *problem.hosts) if is_at(each, home)}
            assume(len(machines) > len(problem.nodes) or carried_out)
            assert {*plan.reward} == (machines if len(machines) > 1 else set())
        else:
            # Where the problem does not say what they take, only a person places reward workers.
            plan = plan.model_copy(update={"reward": (plan.gen[0].node,)})
        plan = with_center(problem, with_relays(problem, plan), None)
        if kind == "pipeline" and not carried_out:
            assume(plan.relay)
            assume(plan.broker.node != plan.train[0].node)
            plan = plan.model_copy(update={"broker": Broker(node=plan.broker.node, count=2)})
        carried_out[kind] += 1
        folder = tmp_path / f"run-{carried_out.total()}"
        folder.mkdir()
        followed, stood = carry_out(problem, plan, model_dir, folder)
        assert (followed.train, followed.mesh) == (plan.train, plan.mesh)
        assert (followed.score, followed.reward, followed.critic) == (plan.score, plan.reward, plan.critic)
        assert (plan.critic is not None) is (kind == "islands")
        assert (followed.broker, followed.scheduler) == (plan.broker, plan.scheduler)
        assert followed.relay == with_relays(problem, followed).relay
        assert sorted(stood) == list(range(plan.num_processes))
        sizes = plan.mesh.sizes(plan.num_processes)
        firsts = [sum(sizes[:island]) for island in range(len(sizes))]
        for first, size in zip(firsts, sizes, strict=True):
            held = Counter()
            for rank in range(first, first + size):
                place, shards = stood[rank], size // plan.mesh.pipeline
                stage = (rank - first) // shards
                assert int(place["shards"]) == shards
                assert int(place["expert_shards"]) == plan.mesh.expert
                assert place["stage"] == f"{stage + 1} of {plan.mesh.pipeline}"
                held[stage] += int(place["holds"])
            layers = plan.mesh.layers_per_stage or (4,)
            # A stage holds what its layers are of the model; tied embeddings are at both ends.
            ends = Counter({stage: (stage == 0) + (stage == len(layers) - 1) for stage in range(len(layers))})
            embedding = problem.model.vocab * problem.model.hidden
            layer = (problem.model.params - embedding) / problem.model.layers
            for stage, count in enumerate(layers):
                expected = count * layer + min(ends[stage], 1) * embedding
                assert held[stage] == pytest.approx(expected, rel=0.01), (plan, held)
        shutil.rmtree(folder)

    run_one()
    assert carried_out[kind] == NUM_PLANS
