import pytest
import yaml

from console.config.config import load_run_config, parse_run_config
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import write_deployment
from console.deploy.machine_check import MachineConfig
from console.node.config import HostConfig, NodeConfig, read_machine
from console.node.node import machine as registered
from console.node.scoring import ScoringPlace, scoring_config, scoring_misfits, scoring_places
from console.node.training import missing_run, trainer_config
from console.run.as_planned import as_planned, elsewhere
from console.run.run_plan import as_message
from console.serve.serve import ServiceKind, load_service_config
from penstock.config import ConfigError, validate
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.planning.plan_message import document_of
from services.scheduler.problem.plan_document import (
    Broker,
    CriticPlace,
    GpuWorkers,
    Replicas,
)
from services.scheduler.service_placement.service_places import with_center, with_relays
from tests.helpers.plans.problems import plan, problem
from tests.unit.console.deploy.deployed import PLAN, SPREAD, deployed, spread_model

JUDGED = "workload.reward={seconds_per_sample: 1, gpu_memory_GB: 16}"
CRITIC_TASKS = (
    "workload.train_tasks=[{name: actor, kind: train}, {name: critic_train, kind: train, is_service: true}, "
    "{name: critic, kind: infer, shares_weights: true, is_service: true}]"
)


@pytest.fixture
def model():
    return spread_model()


def test_a_critic_that_no_plan_places_is_named_or_refused(model):
    run = {**PLAIN_RUN, "algorithm": {"name": "ppo", "critic": "service"}}
    with pytest.raises(ConfigError, match=r"^algorithm.critic: service: --deploy writes no container for a critic"):
        deployed(model, run=run)
    deployed(model, run={**run, "endpoints": {"critic": "far:7309"}})


def test_the_critics_machine_starts_it_where_the_run_calls_it(tmp_path):
    model = CostModel(problem("tiny_04", CRITIC_TASKS, "model.ffn=12288", "cost_model.train_pack_tokens=512"))
    split = plan([("l4-0", 2, 4)], [("a100-0", 8)])
    own = split.model_copy(update={"critic": CriticPlace(node="l40s-0", gpus=8)})
    shared = split.model_copy(update={"critic": CriticPlace(node="a100-0", gpus=8, is_beside_trainer=True)})
    run = {**PLAIN_RUN, "run": {"id": "r", "checkpoint_every_steps": 5}, "trainer": {"num_threads": 3}}
    for document, machine, indices in ((own, "l40s-0", range(8)), (shared, "a100-0", range(8))):
        assert not isinstance(model.score(document), Infeasible)
        assert document_of(as_message(document)) == document
        files = deployed(model, of=document, run=run)
        for name in ("run.yaml", "r0/run.yaml"):
            parsed = parse_run_config(files[name], source=name)
            assert (parsed.endpoints.critic, parsed.algorithm.name) == (f"{machine}:7309", "ppo")
            assert parsed.algorithm.has_critic_service
        node = validate(NodeConfig, files[f"r0/node-{machine}.yaml"], source="")
        assert scoring_places(as_message(document), node) == {
            "critic": ScoringPlace(kind="critic", gpus=tuple(indices))
        }
        config = scoring_config(node, ScoringPlace(kind="critic", gpus=tuple(indices)), free_port=1)
        assert (config.listen, config.run_id, config.processes) == ("0.0.0.0:7309", "r", 8)
        assert (str(config.state_dir), str(config.model_path)) == (f"/runs/{machine}/critic/r", "/data/model")
        assert (config.checkpoint_every_steps, config.num_threads) == (5, 3)
        # On GPUs of its own all activations have room.
        assert config.gradient_checkpointing is (document is shared)
        assert validate(NodeConfig, files["r1/node-l4-0.yaml"], source="").critic is None
        assert f"node-{machine}" in files["r0/docker-compose.yml"]["services"]
        with pytest.raises(ConfigError, match=r"^endpoints.critic: far:1, and the plan has a critic on "):
            deployed(model, of=document, run={**run, "endpoints": {"critic": "far:1"}})
        with pytest.raises(ConfigError, match=r"^algorithm.critic: trainer, and the plan has a critic; set it to"):
            deployed(model, of=document, run={**run, "algorithm": {"critic": "trainer"}})
        places = {"run": {"id": "r"}, "model": {"path": "/m"}, "data": {"train": "/d"}}
        assert "r0/node-a100-0.yaml" in deployed(model, of=shared, run=places, engine="slurm")
    stored = {**run, "run": {"id": "r", "checkpoint_storage": "s3://team/runs"}}
    moved = deployed(model, of=own, run=stored, moves_trainer=True)
    names = ("a100-0", "l40s-0", "l4-0", "l4-1")
    parsed = parse_run_config(moved["r0/run.yaml"], source="run.yaml")
    assert parsed.endpoints.critic == ",".join(f"{name}:7309" for name in names)
    for name in names:
        node = validate(NodeConfig, moved[f"{'r1' if name.startswith('l4-') else 'r0'}/node-{name}.yaml"], source="")
        assert node.critic.stored == "s3://team/runs/r/critic"
        assert pb.ROLE_CRITIC in registered(node, trains=True).roles
    with pytest.raises(ConfigError, match=r"^critic.is_beside_trainer: pods share no GPUs"):
        deployed(model, of=shared, run=run, engine="kubernetes")
    away = plan([("l40s-0", 1, 8)], [("a100-0", 8)]).model_copy(update={"critic": CriticPlace(node="l4-1", gpus=4)})
    with pytest.raises(ConfigError, match=r"^--for skypilot: the plan has a critic on l4-1 of r1, which the trainer"):
        deployed(model, of=away, run=places, engine="skypilot")
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(own.stated()))
    begins = {"scheduler": {"problem": "p.yaml", "plan": str(path)}, "algorithm": {"name": "ppo", "critic": "service"}}
    with pytest.raises(ConfigError, match=r"endpoints.critic: unset, and .*plan.yaml has a critic on l40s-0"):
        as_planned(parse_run_config({**run, **begins}, source="run.yaml"))


@pytest.mark.parametrize("engine", ["compose", "slurm"])
def test_a_trainer_that_moves_may_start_on_every_machine_with_a_folder_of_its_own(model, engine):
    at = "/models/model" if engine == "slurm" else "/data/model"
    run = {"model": {"path": at}, "data": {"train": f"{at}.jsonl"}}
    stored = {**run, "run": {"checkpoint_storage": "s3://team/runs"}}
    files = deployed(model, of=SPREAD, run=stored, engine=engine, moves_trainer=True)

    document = files["r0/run.yaml"]
    places = [f"{name}:7304" for name in ("a100-0", "l40s-0", "l4-0", "l4-1")]
    parsed = parse_run_config(document, source="run.yaml")
    assert parsed.moves_trainer
    assert document["endpoints"]["trainer"] == ",".join(places)
    assert "processes" not in document.get("trainer", {})
    assert "r0/trainer.yaml" not in files
    for site, name in (("r0", "a100-0"), ("r0", "l40s-0"), ("r1", "l4-0"), ("r1", "l4-1")):
        node = validate(NodeConfig, files[f"{site}/node-{name}.yaml"], source="")
        assert node.generator.weights == ",".join(places)
        assert (node.trainer.weights_url, node.trainer.checkpoint_storage) == (f"{name}:7305", "s3://team/runs")
        assert missing_run(node) == ""
        assert trainer_config(node).runs_dir == node.trainer.run_dir.absolute().parent
        assert "data.train" in files[f"{site}/machine-{name}.yaml"]["readable"]
    assert "certs issue operator --run" in files["README.md"]
    assert "certs issue generator trainer --run drawn" in files["README.md"].replace(parsed.run.id, "drawn")
    assert "Checkpoints go through s3://team/runs" in files["README.md"]
    if engine == "compose":
        services = files["r0/docker-compose.yml"]["services"]
        assert {"redis", "broker", "run", "node-a100-0", "node-l40s-0"} <= services.keys()
        assert "trainer" not in services
        assert "trainer" not in services["run"]["depends_on"]
        assert services["node-l40s-0"]["stop_grace_period"] == "335s", "as long as the trainer's checkpoint may take"
    else:
        assert "torchrun" not in files["machine.sh"]
    with pytest.raises(ConfigError, match=r"^run.checkpoint_storage: --moves-trainer needs it"):
        deployed(model, of=SPREAD, run=run, engine=engine, moves_trainer=True)
    with pytest.raises(ConfigError, match=r"^trainer.processes: --moves-trainer: the plan in force sets it"):
        deployed(model, of=SPREAD, run={**stored, "trainer": {"processes": 2}}, engine=engine, moves_trainer=True)


def test_machines_have_the_scorers_and_the_reward_worker_of_the_plan_and_the_run_has_none():
    stated = problem(
        "tiny_04", "workload.train_tasks=[{name: actor, kind: train}, {name: teacher, kind: infer, is_service: true}]"
    )
    services = {"score": (GpuWorkers(node="l40s-0", gpus=1),), "reward": ("l4-0",)}
    document = plan([("l40s-0", 1, 3), ("l4-0", 2, 4)], [("a100-0", 8)]).model_copy(update=services)
    run = {**PLAIN_RUN, "algorithm": {"kl_coefficient": 0.1, "reference_path": "/data/teacher"}}
    files = deployed(CostModel(stated), of=document, run=run)

    assert (files["r0/run.yaml"]["scorers"], files["r0/run.yaml"]["rewards"]) == (0, 0)
    assert files["r0/run.yaml"]["algorithm"]["reference"] == "service"
    assert "reward" not in files["r0/run.yaml"]["endpoints"]
    assert "reward" not in files["r0/docker-compose.yml"]["services"]
    assert "r0/reward.yaml" not in files
    near, far = (validate(NodeConfig, files[f"{at}.yaml"], source="") for at in ("r0/node-l40s-0", "r1/node-l4-0"))
    assert (str(near.scorer.model_path), near.scorer.broker) == ("/data/teacher", "a100-0:7301")
    assert near.reward is not None, "a revision may need one here"
    assert (far.reward.broker, far.reward.listen) == ("a100-0:7301", "0.0.0.0:7303")
    assert files["r0/machine-l40s-0.yaml"]["readable"]["algorithm.reference_path"] == "/data/teacher"
    assert "issue generator reward --run" in files["README.md"]
    followed = as_message(document)
    assert scoring_places(followed, near).keys() == {"scorer-3"}
    assert scoring_places(followed, far).keys() == {"reward"}
    config = scoring_config(near, scoring_places(followed, near)["scorer-3"], free_port=1)
    assert (config.listen, config.worker_id) == ("0.0.0.0:7313", "l40s-0-scorer-3")
    lacking = near.model_copy(update={"scorer": None})
    assert scoring_misfits(followed, lacking) == ["a scorer; the machine's file has no section scorer"]
    judged = document.model_copy(update={"reward": (), "reward_gpus": (GpuWorkers(node="l4-1", gpus=2),)})
    files = deployed(CostModel(problem("tiny_04", JUDGED)), of=judged.model_copy(update={"score": ()}), run=PLAIN_RUN)
    assert files["r0/run.yaml"]["rewards"] == 0
    assert "r0/reward.yaml" not in files
    assert "issue generator reward --run" in files["README.md"]
    judging = validate(NodeConfig, files["r1/node-l4-1.yaml"], source="")
    placed = scoring_places(as_message(judged), judging)
    assert placed == {f"reward-{gpu}": ScoringPlace(kind="reward", gpus=(gpu,)) for gpu in (0, 1)}
    config = scoring_config(judging, placed["reward-1"], free_port=1)
    assert (config.listen, config.worker_id, config.broker) == ("0.0.0.0:7331", "l4-1-reward-1", "a100-0:7301")
    assert document_of(as_message(judged)) == judged
    here = {**run, "algorithm": {**run["algorithm"], "reference": "trainer", "reference_path": None}}
    with pytest.raises(
        ConfigError, match=r"^algorithm.reference: trainer, and the plan has scorers; set it to service"
    ):
        deployed(CostModel(stated), of=document, run=here)
    staged = document.model_copy(update={"gen": (Replicas(node="l40s-0", pp=2),)})
    with pytest.raises(ConfigError, match=r"gen.0.pp: 2 stages, and the engine transformers has none"):
        deployed(CostModel(stated), of=staged, run={**run, "generator": {"engine": "transformers"}})


def test_scorers_are_not_put_into_containers(model):
    run = {**PLAIN_RUN, "algorithm": {"kl_coefficient": 0.1, "reference": "service"}}
    with pytest.raises(ConfigError, match=r"^algorithm.reference: service: --deploy writes no container for scorers"):
        deployed(model, run=run)
    assert deployed(model, run={**run, "scorers": 0})


HOSTED = problem("tiny_04", "hosts=[{name: ctl, region: r0, machines: [desk]}]")
APART = with_center(HOSTED, with_relays(HOSTED, PLAN), None)
"""Redis, broker and scheduler on a machine without GPUs; the head trains."""


def test_broker_redis_and_scheduler_stand_on_the_machine_of_the_plan(tmp_path):
    assert APART.center == {"broker": "desk", "scheduler": "desk"}
    files = deployed(CostModel(HOSTED), of=APART)
    services = files["r0/docker-compose.yml"]["services"]
    of_desk = {name for name, service in services.items() if service["profiles"] == ["desk"]}
    assert of_desk == {"check-desk", "redis", "broker", "scheduler"}
    assert services["broker"]["depends_on"].keys() == {"check-desk", "redis"}
    # The other machines' profiles have no such services to wait for.
    assert services["trainer"]["depends_on"].keys() == {"check-a100-0"}
    assert services["run"]["depends_on"].keys() == {"check-a100-0", "reward", "trainer"}
    assert files["r0/docker-compose.yml"]["volumes"] == {"redis": {}}
    assert "volumes" not in files["r1/docker-compose.yml"]

    for name in ("run.yaml", "r0/run.yaml"):
        stated = files[name]
        assert (stated["endpoints"]["broker"], stated["endpoints"]["scheduler"]) == ("desk:7301", "desk:7306")
        assert not {"broker", "scheduler"} & stated.get("listen", {}).keys()
    for name in ("r0/node-l40s-0.yaml", "r1/node-l4-0.yaml"):
        assert (files[name]["generator"]["broker"], files[name]["scheduler"]) == ("desk:7301", "desk:7306")
        assert files[name]["generator"]["weights"] == "a100-0:7304"
    assert files["r0/broker.yaml"]["scheduler"] == files["r0/reward.yaml"]["broker"].replace("7301", "7306")
    assert files["r0/broker.yaml"]["redis_url"] == "redis://127.0.0.1:7300/0"
    assert "penstock certs issue broker --run" in files["README.md"]
    checked = validate(MachineConfig, files["r0/machine-desk.yaml"], source="machine")
    assert (checked.role, checked.readable, checked.gpus) == ("broker", {}, 0)
    plain = deployed(CostModel(HOSTED), of=PLAN)
    assert plain["r0/docker-compose.yml"]["services"]["broker"]["profiles"] == ["a100-0"]
    assert "r0/node-desk.yaml" not in plain


def test_reward_workers_stand_on_machines_without_gpus_where_the_plan_has_them(tmp_path):
    stated = problem("tiny_04", "hosts=[{name: ctl, region: r0, count: 2, machines: [desk, shelf], cores: 8}]")
    model = CostModel(stated)
    plan = APART.model_copy(update={"reward": ("desk", "shelf", "l40s-0")})
    assert document_of(as_message(plan)) == plan
    files = deployed(model, of=plan)
    services = files["r0/docker-compose.yml"]["services"]
    for name, others in (("desk", {"redis", "broker", "scheduler"}), ("shelf", set())):
        found = {each for each, service in services.items() if service["profiles"] == [name]}
        assert found == {f"check-{name}", f"reward-{name}", *others}
        own = f"/config/reward-{name}.yaml"
        assert services[f"reward-{name}"]["command"] == ["serve", "reward", "--config", own]
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(files[f"r0/reward-{name}.yaml"]))
        read = load_service_config(ServiceKind.REWARD, path, [], listen=None)
        assert (read.worker_id, read.broker) == (f"{name}-reward", "desk:7301")
        on_host = validate(HostConfig, files[f"r0/node-{name}.yaml"], source=name)
        assert on_host.reward is not None
        checked = validate(MachineConfig, files[f"r0/machine-{name}.yaml"], source="machine")
        roles = {"desk": ("broker", ("reward",)), "shelf": ("reward", ())}
        assert (checked.role, tuple(checked.more_roles)) == roles[name]
        assert "model.path" in checked.readable
    assert "reward" not in services, "the head has none"
    assert files["r0/run.yaml"]["rewards"] == 0
    assert files["r0/node-l40s-0.yaml"]["reward"]["broker"] == "desk:7301"
    # Other sites call the head and the broker, not reward workers, which have a pod and no name.
    one_trains = plan.model_copy(update={"train": plan.train[:1]})
    pods = deployed(model, of=one_trains, engine="kubernetes", head_address="head.example,desk.example")
    (worker,) = (each for each in pods["r0/pods-shelf.yaml"] if each["kind"] == "Deployment")
    containers = worker["spec"]["template"]["spec"]["containers"]
    assert [each["args"] for each in containers] == [["serve", "reward", "--config", "/config/reward-shelf.yaml"]]
    named = {each["metadata"]["name"] for each in pods["r0/network.yaml"] if each["kind"] == "Service"}
    assert named == {"a100-0", "desk"}


def test_several_brokers_share_the_redis_and_the_tokens_of_the_run(tmp_path):
    two = APART.model_copy(update={"broker": Broker(node="desk", count=2)})
    files = deployed(CostModel(HOSTED), of=two)
    both = "desk:7301,desk:7320"
    services = files["r0/docker-compose.yml"]["services"]
    assert services["broker-1"]["command"] == ["serve", "broker", "--config", "/config/broker-1.yaml"]
    assert services["broker-1"]["healthcheck"]["test"][-1] == "127.0.0.1:7320"
    for name, address in (("broker", "desk:7301"), ("broker-1", "desk:7320")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(files[f"r0/{name}.yaml"]))
        read = load_service_config(ServiceKind.BROKER, path, [], listen=None)
        assert (read.address, read.redis_url) == (address, "redis://127.0.0.1:7300/0")
    assert files["run.yaml"]["endpoints"]["broker"] == files["r0/run.yaml"]["endpoints"]["broker"] == both
    assert files["r1/node-l4-0.yaml"]["generator"]["broker"] == files["r0/reward.yaml"]["broker"] == both
    assert parse_run_config(files["r0/run.yaml"], source="run").policy.token_shards == 8
    host = validate(HostConfig, files["r0/node-desk.yaml"], source="desk")
    assert [each.address for each in host.brokers] == both.split(",")
    assert document_of(as_message(two)) == two
    with pytest.raises(ConfigError, match=r"broker.count: 2; the head has one, which the run starts; set it to 1"):
        deployed(CostModel(HOSTED), of=PLAN.model_copy(update={"broker": Broker(node="a100-0", count=2)}))


def test_without_containers_penstock_node_starts_them_there_and_the_run_waits_for_them(tmp_path):
    written = tmp_path / "out"
    write_deployment(written, CostModel(HOSTED), APART, address="127.0.0.1")
    host = read_machine(written / "r0" / "node-desk.yaml")
    assert isinstance(host, HostConfig)
    assert (host.brokers[0].listen, host.scheduler.listen) == ("127.0.0.1:7301", "127.0.0.1:7306")
    assert host.brokers[0].scheduler == "127.0.0.1:7306"
    assert "redis_url" not in host.brokers[0].model_fields_set, "its Redis is its own"
    run = load_run_config(written / "run.yaml")
    assert str(written / "r0" / "node-desk.yaml") in map(str, run.scheduler.nodes)
    assert elsewhere(as_planned(run)) == {"broker": "127.0.0.1:7301", "scheduler": "127.0.0.1:7306"}

    alone = run.model_copy(update={"endpoints": run.endpoints.model_copy(update={"broker": None})})
    with pytest.raises(ConfigError, match=r"endpoints.broker: unset, and .*plan.yaml has the broker on desk"):
        as_planned(alone)
    files = deployed(CostModel(HOSTED), of=PLAN, address="127.0.0.1")
    assert "broker" in files["run.yaml"]["listen"]
    assert elsewhere(parse_run_config(files["run.yaml"] | {"scheduler": {}}, source="run")) == {}
    for change, told in (
        (
            {"broker": Broker(node="l4-0")},
            "broker.node: l4-0; the broker stands on the head or on .* of r0: name a100-0 or desk",
        ),
        ({"scheduler": "nobody"}, "scheduler: nobody; the scheduler stands on the head"),
    ):
        with pytest.raises(ConfigError, match=told):
            deployed(CostModel(HOSTED), of=PLAN.model_copy(update=change))
