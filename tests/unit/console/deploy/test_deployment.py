import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from console.config.config import load_run_config, parse_run_config
from console.deploy.configurations import PLAIN_RUN
from console.deploy.deployment import write_deployment
from console.deploy.machine_check import MachineConfig
from console.node.assignment import Placement, generator_config
from console.node.config import NodeConfig, read_machine
from console.run.as_planned import as_planned
from console.run.run_plan import as_message, trainer_settings
from console.serve.serve import ServiceKind, load_service_config
from penstock.config import ConfigError, read_document, validate
from services.reward.config import RewardConfig
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.planning.plan_message import document_of
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.plan_document import PlanDocument, TrainShare, read_plan
from services.scheduler.problem.problem import read_problem
from tests.helpers.plans.problems import plan, problem
from tests.unit.console.deploy.deployed import PLAN, SPREAD, deployed, spread_model


@pytest.fixture
def model():
    return spread_model()


def test_every_file_is_accepted_by_what_reads_it(model, tmp_path):
    written = write_deployment(tmp_path / "out", model, PLAN)

    for path in written:
        if path.name == "run.yaml":
            load_run_config(path)
        elif path.name.startswith("node-"):
            read_machine(path)
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
    # torchrun kills a process 30 s after SIGTERM, unless it is told how long a last checkpoint may take.
    assert all("--shutdown-timeout=305" in each["entrypoint"] for each in (head, other))
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
    problem_path = tmp_path / "problem.yaml"
    others = problem("tiny_04", "links=[]", "nodes=[{name: other, gpu: A100-80, gpus: 8, region: r0}]")
    problem_path.write_text(others.model_dump_json(by_alias=True, exclude_none=True))
    differing = {"scheduler": {"problem": str(problem_path), "plan": str(path)}}
    with pytest.raises(ConfigError, match=r"plan.yaml: train.0.node: there is no machine 'a100-0' in .*problem.yaml; "):
        as_planned(parse_run_config({**PLAIN_RUN, "run": {"id": "r"}, **differing}, source="run.yaml"))


def test_stages_and_split_layers_are_what_the_trainer_calls_them(model):
    pool = (TrainShare(node="a100-0", gpus=4), TrainShare(node="l40s-0", gpus=8))
    for mesh, parallel in (
        (Mesh(pipeline=3, layers_per_stage=(20, 8, 8)), {"pipeline": 3, "layers_per_stage": [20, 8, 8], "shard": 4}),
        (Mesh(islands=(6, 6), tensor=2), {"replicate": 2, "shard": 3, "tensor": 2}),
        (Mesh(islands=(6, 6), expert=3), {"replicate": 2, "shard": 6, "expert": 3}),
        (Mesh(islands=(6, 6), offload=True), {"replicate": 2, "shard": 6}),
        (Mesh(), {}),
    ):
        meshed = SPREAD.model_copy(update={"train": pool, "mesh": mesh})
        trainer = deployed(model, of=meshed)["run.yaml"]["trainer"]
        assert {key: value for key, value in trainer["parallel"].items() if value != 1} == parallel
        assert trainer.get("offload") is (True if mesh.offload else None)
        assert trainer_settings(as_message(meshed)).get("offload") == trainer.get("offload")
        assert document_of(as_message(meshed)).mesh == mesh.model_copy(update={"islands": mesh.islands or (12,)})
    with pytest.raises(ValidationError, match=r"islands: .* are unlike beside tensor, pipeline, expert or offload"):
        Mesh(islands=(4, 8), pipeline=2)
    offloaded = SPREAD.model_copy(update={"train": pool, "mesh": Mesh(offload=True)})
    with pytest.raises(ConfigError, match=r"trainer.device: cpu, and in the plan GPUs offload the trainer's state"):
        deployed(model, of=offloaded, run={**PLAIN_RUN, "trainer": {"device": "cpu"}})


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
    with pytest.raises(ConfigError, match="--for: 'nomad' is unknown; choose one of compose"):
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
