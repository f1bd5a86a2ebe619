import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from console.config.config import load_run_config, parse_run_config
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import deployment, write_deployment
from console.deploy.machine_check import MachineConfig
from console.node.assignment import Placement, generator_config
from console.node.config import HostConfig, NodeConfig, read_machine, read_node
from console.node.scoring import ScoringPlace, scoring_config, scoring_misfits, scoring_places
from console.node.training import missing_run, trainer_config
from console.run.as_planned import as_planned, elsewhere
from console.run.run_plan import as_message
from console.serve.serve import ServiceKind, load_service_config
from penstock.config import ConfigError, read_document, validate
from services.reward.config import RewardConfig
from services.scheduler.cost_model.reference import CostModel, Infeasible
from services.scheduler.planning.plan_message import document_of
from services.scheduler.planning.service_places import with_center, with_relays
from services.scheduler.problem.plan_document import (
    Broker,
    CriticPlace,
    GpuWorkers,
    Mesh,
    PlanDocument,
    Replicas,
    TrainShare,
    read_plan,
)
from services.scheduler.problem.problem import read_problem
from tests.helpers.plans.problems import plan, problem

PLAN = plan([("l40s-0", 1, 3), ("l40s-0", 4, 1), ("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 1)])


@pytest.fixture
def model():
    return CostModel(problem("tiny_04"))


SPREAD = plan([("l4-0", 2, 4)], [("a100-0", 4), ("l40s-0", 8)])


def deployed(model, *, of=PLAN, run=PLAIN_RUN, address=None, folder=Path("/out"), engine="compose", **more):
    return deployment(model, of, run=run, address=address, folder=folder, engine=engine, **more)


def test_every_file_is_accepted_by_what_reads_it(model, tmp_path):
    written = write_deployment(tmp_path / "out", model, PLAN)

    for path in written:
        if path.name == "run.yaml":
            load_run_config(path)
        elif path.name.startswith("node-"):
            read_node(path)
        elif path.name == "problem.yaml":
            assert read_problem(path) == model.problem
        elif path.name == "plan.yaml":
            assert read_plan(path) == PLAN
        elif path.name.startswith("machine-"):
            validate(MachineConfig, read_document(path), source=path.name)
        elif path.name not in ("docker-compose.yml", "README.md", ".env", "secrets.env"):
            load_service_config(ServiceKind(path.stem), path, [], listen=None)
    assert {str(path.relative_to(tmp_path / "out")) for path in written} == {
        "run.yaml",
        "README.md",
        *(f"r0/{name}.yaml" for name in ("run", "problem", "plan", "broker", "scheduler", "reward", "trainer")),
        "r0/docker-compose.yml",
        "r1/docker-compose.yml",
        "r0/node-a100-0.yaml",
        "r0/node-l40s-0.yaml",
        "r1/node-l4-0.yaml",
        "r1/node-l4-1.yaml",
        *(f"{site}/{name}" for site in ("r0", "r1") for name in (".env", "secrets.env")),
        *(f"r0/machine-{name}.yaml" for name in ("a100-0", "l40s-0")),
        *(f"r1/machine-{name}.yaml" for name in ("l4-0", "l4-1")),
    }


def listeners(files) -> dict[str, list[str]]:
    """Where each service and each machine's generators listen, by file."""
    found = {}
    for name, document in files.items():
        if isinstance(document, dict) and not name.endswith(("docker-compose.yml", "problem.yaml", "plan.yaml")):
            stated = {**document, **document.get("listen", {})} if name.endswith("run.yaml") else document
            stated = {**stated, **stated.get("generator", {})} if "node-" in name else stated
            keys = ("listen", "weights_listen", "broker", "scheduler", "reward", "trainer", "weights")
            values = (stated.get(key) for key in (keys if name.endswith("run.yaml") else keys[:2]))
            found[name] = [value for value in values if isinstance(value, str)]
    return found


def test_machines_speak_tls_with_a_certificate_each(model):
    files = deployed(model, of=SPREAD)
    services = {**files["r0/docker-compose.yml"]["services"], **files["r1/docker-compose.yml"]["services"]}

    assert {"broker", "run", "trainer", "trainer-l40s-0", "node-l4-1"} <= services.keys()
    for name, service in services.items():
        if name != "redis":
            assert service["environment"]["PENSTOCK_TLS_KEY"] == "/run/secrets/key.pem", name
            assert any(each.startswith("${PENSTOCK_SECRETS:?") for each in service["volumes"]), name
    assert "http://" not in str(files)
    assert not any("insecure" in document for document in files.values())
    text = files["README.md"]
    for words in (
        "penstock certs issue operator --run '*' --site '*' --name a100-0 --host a100-0",
        "penstock certs issue generator --run tiny_04_4n_2reg_8b --site r1 --name l4-0 --host l4-0",
        "trusts_network: true",
    ):
        assert words in text.replace("\\\n   ", "")
    # What the certificate of its machine binds a generator's name to.
    assert "--name l4-1 " in text
    assert generator_config_of(files["r1/node-l4-1.yaml"]).generator_id == "l4-1-gen-0"


def generator_config_of(document):
    return generator_config(validate(NodeConfig, document, source="node"), Placement(gpus=(0,)), port=7400)


def test_plain_text_stays_on_loopback_unless_it_is_asked_for(model):
    run = {**PLAIN_RUN, "insecure": True}
    tried = deployed(model, address="127.0.0.1")
    assert {value.partition(":")[0] for values in listeners(tried).values() for value in values} == {"127.0.0.1"}
    assert not any("insecure" in document for document in tried.values())
    asked = deployed(model, run=run)
    assert all(asked[name]["insecure"] for name, values in listeners(asked).items() if values)
    assert {value.partition(":")[0] for values in listeners(asked).values() for value in values} == {"0.0.0.0"}
    assert generator_config_of(asked["r1/node-l4-1.yaml"]).insecure
    assert "certs" not in tried["README.md"] + asked["README.md"]


def test_machines_find_the_head_and_relay_only_where_the_trainer_is_far(model):
    files = deployed(model)
    far, near = files["r1/node-l4-0.yaml"], files["r0/node-l40s-0.yaml"]

    assert (far["generator"]["broker"], far["generator"]["weights"]) == ("a100-0:7301", "a100-0:7304")
    assert (far["scheduler"], far["address"]) == ("a100-0:7306", "l4-0")
    assert far["generator"]["site"] == far["site"] == "r1"
    assert "site" not in near["generator"]
    assert files["r0/reward.yaml"]["tokenizer_path"] == far["generator"]["model_path"]
    assert files["run.yaml"]["algorithm"] == {"group_size": 8, "prompts_per_step": 128, "max_staleness": 1}
    assert files["run.yaml"]["scheduler"] == {"problem": "r0/problem.yaml", "plan": "r0/plan.yaml"}


def test_trainers_start_on_every_machine_of_the_pool(model):
    files = deployed(model, of=SPREAD)
    services = files["r0/docker-compose.yml"]["services"]
    head, other = services["trainer"], services["trainer-l40s-0"]

    assert head["entrypoint"][:4] == ["torchrun", "--nnodes=2", "--node-rank=0", "--nproc-per-node=4"]
    assert other["entrypoint"][:4] == ["torchrun", "--nnodes=2", "--node-rank=1", "--nproc-per-node=8"]
    assert "--master-addr=a100-0" in other["entrypoint"]
    assert (head["profiles"], other["profiles"]) == (["a100-0"], ["l40s-0"])
    shares = files["run.yaml"]["trainer"]["processes"]
    speeds = [model.gpu_training_rate[name] for name in ("a100", "l40s")]
    assert shares == [round(speeds[0] / max(speeds), 4)] * 4 + [round(speeds[1] / max(speeds), 4)] * 8
    # torchrun starts the trainer, so the run attaches to it.
    assert files["run.yaml"]["endpoints"] == {"trainer": "a100-0:7304"}


def test_processes_stand_in_the_plans_mesh(model):
    islands = SPREAD.model_copy(
        update={
            "train": (TrainShare(node="a100-0", gpus=4, share=1), TrainShare(node="l40s-0", gpus=8, share=0.7)),
            "mesh": Mesh(islands=(4, 8)),
        }
    )
    emulated = {
        "generator": {"engine": "emulated", "emulated": {"model": "qwen2.5-1.5b"}},
        "trainer": {"device": "cpu", "num_threads": 1},
    }
    for run, address in ((PLAIN_RUN, None), ({**PLAIN_RUN, **emulated}, "127.0.0.1")):
        files = deployed(model, of=islands, run=run, address=address)
        trainer = files["run.yaml"]["trainer"]
        assert trainer["processes"] == [1.0] * 4 + [0.7] * 8
        assert trainer["parallel"] == {"islands": [4, 8]}
        assert validate(PlanDocument, files["r0/plan.yaml"], source="plan") == islands
        # On one host a trainer starts all processes itself.
        assert ("trainer" in files["run.yaml"]["endpoints"]) is (address is None)
        assert document_of(as_message(islands)) == islands
    by_trainer = CostModel(problem("tiny_04", "model.ffn=12288", "cost_model.train_pack_tokens=8192"))
    assert deployed(by_trainer, of=islands)["run.yaml"]["trainer"]["tokens_per_pack"] == 8192
    own = {**PLAIN_RUN, "trainer": {"parallel": {"shard": 12}}}
    with pytest.raises(ConfigError, match=r"trainer.parallel: the plan states a mesh of its own; leave it out"):
        deployed(model, of=islands, run=own)


def test_a_run_stands_in_the_mesh_of_the_plan_that_it_begins_with(tmp_path):
    path = tmp_path / "plan.yaml"
    pool = [{"node": "a100-0", "gpus": 2, "share": 1.0}, {"node": "l40s-0", "gpus": 1, "share": 0.5}]
    path.write_text(yaml.safe_dump({"gen": [], "train": pool, "mesh": {"islands": [2, 1]}}))

    def run(**trainer):
        scheduler = {"problem": "problem.yaml", "plan": str(path)}
        document = {**PLAIN_RUN, "run": {"id": "r"}, "scheduler": scheduler, "trainer": trainer}
        return parse_run_config(document, source="run.yaml")

    planned = as_planned(run(num_threads=3)).trainer
    assert planned.shares == (1.0, 1.0, 0.5)
    assert planned.parallel.islands == (2, 1)
    assert planned.num_threads == 3
    assert as_planned(run(processes=[1, 1, 0.5], parallel={"islands": [2, 1]})).trainer == planned.model_copy(
        update={"num_threads": 1}
    )
    with pytest.raises(ConfigError, match=r"trainer.processes: 4, and .*plan.yaml plans \(1.0, 1.0, 0.5\)"):
        as_planned(run(processes=4))
    path.write_text(yaml.safe_dump({"gen": [], "train": pool[:1]}))
    assert as_planned(run(processes=4)) == run(processes=4)


def test_stages_and_split_layers_are_what_the_trainer_calls_them(model):
    pool = (TrainShare(node="a100-0", gpus=4), TrainShare(node="l40s-0", gpus=8))
    for mesh, parallel in (
        (Mesh(pipeline=3, layers_per_stage=(20, 8, 8)), {"pipeline": 3, "layers_per_stage": [20, 8, 8], "shard": 4}),
        (Mesh(islands=(6, 6), tensor=2), {"replicate": 2, "shard": 3, "tensor": 2}),
        (Mesh(), {}),
    ):
        meshed = SPREAD.model_copy(update={"train": pool, "mesh": mesh})
        stated = deployed(model, of=meshed)["run.yaml"]["trainer"]["parallel"]
        assert {key: value for key, value in stated.items() if value != 1} == parallel
        assert document_of(as_message(meshed)).mesh == mesh.model_copy(update={"islands": mesh.islands or (12,)})
    with pytest.raises(ValidationError, match=r"islands: .* are unlike beside tensor or pipeline; make them equal"):
        Mesh(islands=(4, 8), pipeline=2)


def test_a_trainer_of_one_machine_starts_its_processes_itself(model):
    files = deployed(model, of=plan([("l4-0", 2, 4)], [("a100-0", 4)]))

    assert files["run.yaml"]["trainer"]["processes"] == 4
    assert files["run.yaml"]["endpoints"] == {}
    assert "entrypoint" not in files["r0/docker-compose.yml"]["services"]["trainer"]


def test_emulated_machines_need_no_gpu_and_all_stand_beside_the_run(model, tmp_path):
    emulated = {"model": "qwen2.5-1.5b", "time_scale": 5}
    run = {**PLAIN_RUN, "generator": {"engine": "emulated", "count": 3, "emulated": emulated}}
    files = deployed(model, run=run, address="127.0.0.1", folder=tmp_path)
    node = files["r1/node-l4-0.yaml"]["generator"]

    assert "deploy" not in str(files["r1/docker-compose.yml"])
    assert node["emulated"] == {**emulated, "gpu": "L4", "lengths": str(tmp_path / "r1/lengths.txt")}
    lengths = [int(line) for line in files["r1/lengths.txt"].split()]
    assert sum(lengths) / len(lengths) == pytest.approx(model.demand.completion_tokens, rel=0.05)
    assert len(files["run.yaml"]["scheduler"]["nodes"]) == 4
    ports = [
        files[f"{name}.yaml"]["generator"]["listen"] for name in ("r0/node-l40s-0", "r1/node-l4-0", "r1/node-l4-1")
    ]
    assert len(set(ports)) == 3
    with pytest.raises(ConfigError, match=r"generator.emulated.speed: unknown"):
        deployed(model, run={**run, "generator": {"engine": "emulated", "emulated": {**emulated, "speed": 2}}})


def test_a_model_that_no_emulated_gpu_knows_must_be_named(model):
    run = {**PLAIN_RUN, "generator": {"engine": "emulated"}}
    strange = CostModel(problem("tiny_04", "model.layers=7"))
    with pytest.raises(ConfigError, match=r"generator.emulated.model: the problem's model is none of"):
        deployed(strange, run=run)


def test_a_problem_that_trains_a_critic_is_run_by_ppo_whose_groups_may_be_of_one():
    streamrl = CostModel(problem("str_01"))
    split = plan([("h800-0", 1, 8)], [(f"h800-{index}", 8) for index in (1, 2, 3)])
    found = [content for name, content in deployed(streamrl, of=split).items() if name.endswith("run.yaml")]

    assert found
    assert all((each["algorithm"]["name"], each["algorithm"]["group_size"]) == ("ppo", 1) for each in found)
    with pytest.raises(ConfigError, match=r"algorithm.group_size: 1 leaves rloo nothing to compare"):
        deployed(streamrl, of=split, run={**PLAIN_RUN, "algorithm": {"name": "rloo"}})


def test_what_cannot_be_written_is_reported(model, tmp_path):
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="is not an empty folder"):
        write_deployment(tmp_path, model, PLAN)
    spaced = CostModel(problem("tiny_02", "nodes=[{name: my box, gpu: H800, gpus: 8}]"))
    with pytest.raises(ConfigError, match=r"nodes.0.name: 'my box' cannot name a machine"):
        deployed(spaced, of=plan([("my box-0", 1, 4)], [("my box-0", 4)]))
    with pytest.raises(ConfigError, match="algorithm"):
        deployed(model, run={**PLAIN_RUN, "algorithm": {"label": "grpo"}})


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
def test_docker_compose_accepts_each_sites_file(model, tmp_path):
    write_deployment(tmp_path / "out", model, PLAN)
    for site, machine, services in (("r0", "a100-0", 8), ("r0", "l40s-0", 3), ("r1", "l4-0", 2)):
        file = tmp_path / "out" / site / "docker-compose.yml"
        command = ["docker-compose", "-f", str(file), "--profile", machine, "config"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "set it in .env to the folder with model and data" in told.stderr
        filled = {**os.environ, "PENSTOCK_DATA": "/data", "PENSTOCK_RUNS": "/runs"}
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=filled)
        assert told.returncode == 0, told.stderr
        shown = yaml.safe_load(told.stdout)["services"]
        assert sum(each["profiles"] == [machine] for each in shown.values()) == services


def test_a_trainer_may_use_what_the_run_names_and_nothing_else(model):
    files = deployed(model)
    assert files["r0/trainer.yaml"]["allowed_roots"] == ["/data", "/runs"]
    assert files["r0/run.yaml"]["run"]["dir"] == "/runs"
    here = deployed(model, address="127.0.0.1")
    assert here["r0/trainer.yaml"]["allowed_roots"] == ["runs", "/data/model", "/data/train.jsonl"]


def test_addresses_in_object_storage_are_the_same_everywhere_and_the_trainer_s_alone(model):
    run = {**PLAIN_RUN, "model": {"path": "s3://team/model"}, "run": {"checkpoint_storage": "s3://team/runs"}}
    files = deployed(model, run=run)
    assert files["r1/node-l4-0.yaml"]["generator"]["model_path"] == "s3://team/model"
    assert files["r0/trainer.yaml"]["allowed_storage"] == ["s3://team/model", "s3://team/runs"]
    assert files["r1/machine-l4-0.yaml"]["readable"] == {"model.path": "s3://team/model"}
    assert files["r0/machine-a100-0.yaml"]["writable"]["run.checkpoint_storage"] == "s3://team/runs"
    assert "run.checkpoint_storage" not in files["r1/machine-l4-0.yaml"]["writable"]


def test_paths_mean_the_same_on_every_machine_or_are_refused(model):
    run = {**PLAIN_RUN, "model": {"path": "models/mine"}}
    files = deployed(model, run=run, folder=Path("/home/me/out"))
    assert "/home/me" not in str(files)
    assert files["r1/node-l4-0.yaml"]["generator"]["model_path"] == "/data/models/mine"
    assert files["r1/machine-l4-0.yaml"]["readable"] == {"model.path": "/data/models/mine"}
    with pytest.raises(ConfigError, match=r"model.path: /home/me/mine is outside /data"):
        deployed(model, run={**run, "model": {"path": "/home/me/mine"}})
    with pytest.raises(ConfigError, match="--for: 'nomad' is unknown; there is: compose"):
        deployed(model, engine="nomad")


def test_canaries_are_where_the_reward_worker_is(model):
    known = {"path": "known.jsonl", "every": 10}
    judged = {"name": "a", "path": "a.jsonl", "reward": {"model": "numeric", "canaries": {"path": "judge.jsonl"}}}
    run = {**PLAIN_RUN, "reward": {"model": "exact_match", "canaries": known}, "data": {"train": [judged]}}
    files = deployed(model, run=run)
    worker = validate(RewardConfig, files["r0/reward.yaml"], source="")
    assert worker.reward.canaries.path == Path("/data/known.jsonl")
    assert worker.sources["a"].canaries.path == Path("/data/judge.jsonl")
    readable = files["r0/machine-a100-0.yaml"]["readable"]
    assert readable["reward.canaries.path"] == "/data/known.jsonl"
    assert readable["data.train.0.reward.canaries.path"] == "/data/judge.jsonl"
    assert "reward.canaries.path" not in files["r1/machine-l4-0.yaml"]["readable"]
    with pytest.raises(ConfigError, match=r"reward.canaries.path: /home/me/known.jsonl is outside /data"):
        deployed(model, run={**run, "reward": {"canaries": {"path": "/home/me/known.jsonl"}}})
    assert known["path"] == "known.jsonl"


def test_the_schedulers_own_service_has_the_settings_that_the_run_states(model, tmp_path):
    stated = {"heartbeat_interval_s": 2.0, "cost_model": "calibrated", "length_model": "/models/lengths"}
    write_deployment(tmp_path / "out", model, PLAN, run={**PLAIN_RUN, "scheduler": stated})

    read = load_service_config(ServiceKind.SCHEDULER, tmp_path / "out" / "r0" / "scheduler.yaml", [], listen=None)
    assert (read.heartbeat_interval_s, read.cost_model) == (2.0, "calibrated")
    assert (read.lengths.model_path, read.lengths.pairs_file) == (Path("/models/lengths"), None)
    assert read.lengths.state_dir.is_relative_to("/runs")


JUDGED = "workload.reward={seconds_per_sample: 1, gpu_memory_GB: 16}"
CRITIC_TASKS = (
    "workload.train_tasks=[{name: actor, kind: train}, {name: critic_train, kind: train, is_service: true}, "
    "{name: critic, kind: infer, shares_weights: true, is_service: true}]"
)


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
    assert (str(near.scorer.model_path), near.scorer.broker, near.reward) == ("/data/teacher", "a100-0:7301", None)
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
