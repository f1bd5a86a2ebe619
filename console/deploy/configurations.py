"""Writes the configuration of every service and machine of a deployment, the same for all engines but for folders.

Machines are reached under their own names, which must resolve where they are used (or all under one address, to try a
deployment on one machine). Each runs `penstock node`, which starts the generators that the plan assigns to it and
follows revisions. The first machine of the training pool is the head, where the run's own services are, but for broker,
Redis and scheduler where the plan has them on a machine without GPUs.

Every service listens on all addresses with mutual TLS and a certificate for each machine; plain text is used only on
loopback, or if the run's configuration says `insecure: true`.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePath

from console.config.config import parse_run_config
from console.config.data_section import canary_files, data_files
from console.config.derive import training_config
from console.deploy.description import (
    CRITIC_PORT,
    GPU_REWARD_PORT,
    HOST_REWARD_PORT,
    IN_CONTAINERS,
    PORTS,
    SCORER_PORT,
    Layout,
    broker_name,
    broker_port,
    host_reward,
)
from console.deploy.environments import is_served, reached_environment
from console.deploy.machine_check import MachineConfig
from console.deploy.nodes import LENGTHS_FILE, Machine, drawn_lengths, machines
from console.deploy.run_settings import (
    DATA,
    check_center,
    check_critic,
    check_engine,
    check_moves,
    check_names,
    placed,
    run_config,
    run_sources,
    scheduler_config,
    trainer_roots,
)
from console.deploy.trainers import RENDEZVOUS_PORT, training_machines
from console.deploy.worker_settings import reward_settings, scorer_settings
from console.node.config import HostConfig, NodeConfig
from penstock.config import ConfigError, Document, StrictModel, validate
from penstock.process.grace_periods import LAST_ACT_S
from penstock.security.plain_text import is_local
from penstock.storage.addresses import looks_like_address
from services.generator.engines.registry import engine_keys
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import CriticPlace, PlanDocument, host_classes, node_classes

PLAIN_RUN: Document = {"model": {"path": "/data/model"}, "data": {"train": "/data/train.jsonl"}}
"""The default run configuration: paths that the user has to fill."""
_LOOPBACK = "127.0.0.1"
FIRST_MOVED_PORT = 7200
"""First port of trainers that move between machines tried on one host."""
FIRST_CRITIC_PORT = 7100
"""The same of critics."""


class Configurations:
    """The configurations of one deployment.

    Args:
        model: The problem and its cost model.
        plan: Who trains and who generates.
        run: The run's own configuration.
        layout: Where services find their files.
        address: Reaches every machine, to try a deployment on this one; None: each is reached under its own name.
        folder: Absolute path of the deployment here.
        moves_trainer: Whether revisions may move the trainer to any machine.

    Raises:
        ConfigError: the run or a name in the problem does not do.
    """

    def __init__(
        self,
        model: CostModel,
        plan: PlanDocument,
        *,
        run: Document,
        layout: Layout,
        address: str | None,
        folder: Path,
        moves_trainer: bool = False,
    ) -> None:
        check_names(model.problem)
        check_engine(plan, run)
        check_center(model.problem, plan)
        if moves_trainer:
            check_moves(run)
        self.moves_trainer = moves_trainer
        self.model, self.plan, self.layout, self.address, self.folder = model, plan, layout, address, folder
        self.is_emulated = run.get("generator", {}).get("engine") == "emulated"
        stated = run if address is not None else placed(run, layout)
        self.config = run_config(model, plan, stated, is_emulated=self.is_emulated, moves_trainer=moves_trainer)
        """The run's settings, with those that the plan was computed for."""
        self.machines = machines(model.problem, plan, is_one_host=address is not None, moves_trainer=moves_trainer)
        self.trainers = training_machines(model, plan, address=address, moves=moves_trainer)
        self.head = self.trainers[0]
        self.rewards = [name for name in plan.reward if name != self.head.name]
        """Machines beside the head with a reward worker that takes no GPU."""
        work = model.problem.workload.reward
        self.may_add_rewards = work is not None and not work.gpu_memory_GB
        """Whether revisions may place reward workers that take no GPU on further machines."""
        self.head_rewards = self.head.name in plan.reward or not (plan.reward or plan.reward_gpus)
        """Whether the head has one."""
        if (critic := plan.critic) is not None:
            check_critic(self.config, critic, layout, moves=moves_trainer)
            names = [each.name for each in self.machines] if self.moves_critic else [critic.node]
            self.config["endpoints"]["critic"] = ",".join(f"{self.host(at)}:{self._critic_port(at)}" for at in names)
        self.listen_host = _LOOPBACK if address is not None and is_local(f"{address}:1") else "0.0.0.0"
        self.is_insecure = bool(self.config.get("insecure", False))
        self.has_certificates = not self.is_insecure and self.listen_host != _LOOPBACK
        self.serves_environment = is_served(self.config)
        """Whether the head serves the run's environment."""
        used = dict.fromkeys((*plan.center.values(), *plan.reward))
        self.hosts = [name for name in used if name in host_classes(model.problem)]
        """Machines without GPUs that the plan uses."""
        self.center = {name: f"{self.host(self.place(name))}:{port}" for name, port in PORTS.items()}
        """Addresses of the run's services."""
        self.center["broker"] = ",".join(self._broker_address(index) for index in range(self.num_brokers))
        if moves_trainer:
            places = (f"{self.host(each.name)}:{self._trainer_port(each.name)}" for each in self.machines)
            self.center["trainer"] = ",".join(places)

    def files(self) -> dict[str, Document | str]:
        """Every document or text by its path in the folder; all are validated. Raises ConfigError."""
        home = self.head.site
        runs = {"run.yaml": self._run_outside(), f"{home}/run.yaml": self._run_inside()}
        if not self.layout.is_container:
            runs = {f"{home}/run.yaml": self._run_outside()}
        for name, document in runs.items():
            parsed = parse_run_config(document, source=name)
            training_config(parsed, broker="127.0.0.1:1", source=name)
            if self.plan.score and not parsed.algorithm.has_scorer:
                raise ConfigError(
                    "algorithm.reference: trainer, and the plan has scorers; set it to service, or is_service of the "
                    "problem's task to false and plan again"
                )
        found: dict[str, Document | str] = {
            **runs,
            f"{home}/problem.yaml": self.model.problem.model_dump(mode="json", by_alias=True, exclude_none=True),
            f"{home}/plan.yaml": self.plan.stated(),
            **(self._services() if self.layout.is_container else {}),
            **self._of_machines(),
        }
        for site in {each.site for each in self.trainers}:
            if not self.moves_trainer and (self.layout.is_container or self.head.torchrun):
                found[f"{site}/trainer.yaml"] = self._service(self._trainer())
        if self.is_emulated:
            for site in {each.site for each in self.machines}:
                found[f"{site}/{LENGTHS_FILE}"] = drawn_lengths(self.model.problem)
        return found

    def _of_machines(self) -> dict[str, Document]:
        """What `penstock node` reads on each machine that runs it, and what checks each. Raises ConfigError."""
        documents: list[tuple[str, str, type[StrictModel], Document]] = [
            *(("node", name, HostConfig, self._host(name)) for name in self.hosts),
            *(("node", machine.name, NodeConfig, self._node(machine)) for machine in self.machines),
            *(("machine", name, MachineConfig, self._machine(name)) for name in self.names()),
        ]
        for _, name, kind, document in documents:
            validate(kind, document, source=name)
        return {f"{self.site(name)}/{what}-{name}.yaml": document for what, name, _, document in documents}

    def names(self) -> list[str]:
        """All machines: those that train first, those without GPUs last."""
        names = (*(each.name for each in self.trainers), *(each.name for each in self.machines), *self.hosts)
        return list(dict.fromkeys(names))

    def place(self, service: str) -> str:
        """The machine of a service of the run; Redis is where the broker is."""
        return self.plan.center.get("broker" if service == "redis" else service, self.head.name)

    @property
    def num_brokers(self) -> int:
        """Processes on the one Redis."""
        return 1 if self.plan.broker is None else self.plan.broker.count

    def site(self, machine: str) -> str:
        """Its region."""
        problem = self.model.problem
        return (node_classes(problem) | host_classes(problem))[machine].region

    def host(self, machine: str) -> str:
        """How others reach a machine."""
        return self.address or machine

    def role(self, machine: str) -> str:
        """The role of its certificate: those that train open everything."""
        if machine in self.hosts:
            return "broker" if machine in self.plan.center.values() else "reward"
        if self.moves_trainer:
            return "operator" if machine == self.head.name else "generator"
        return "operator" if any(each.name == machine for each in self.trainers) else "generator"

    def more_roles(self, machine: str) -> tuple[str, ...]:
        """Further roles of its certificate, for what it starts beside generators."""
        if self.role(machine) in ("operator", "reward"):
            return ()
        if machine in self.hosts:
            return ("reward",) if machine in self.rewards else ()
        scores = machine in self.rewards or (
            bool(self.plan.score or self.plan.reward_gpus or self.rewards or self.may_add_rewards)
            and any(each.name == machine for each in self.machines)
        )
        return (*(["trainer"] if self.moves_trainer else []), *(["reward"] if scores else []))

    def first_gpu(self, machine: str) -> int:
        """Index of the first GPU that its `penstock node` is given; where GPUs have no names, those before it train."""
        if self.layout.names_gpus or self.moves_trainer:
            return 0
        return next((each.gpus for each in self.trainers if each.name == machine), 0)

    def _service(self, document: Document) -> Document:
        return {"insecure": True, **document} if self.is_insecure else document

    def _listen(self, name: str) -> str:
        return f"{self.listen_host}:{PORTS[name]}"

    def _run_outside(self) -> Document:
        """Configuration for `penstock run` on the head; it attaches to the trainer if torchrun starts that."""
        listen = {name: self._listen(name) for name in ("broker", "scheduler", "reward", "trainer", "weights")}
        document = self._with_plan(self._outside(self.head.site))
        if self.address is not None:
            followers = (*self.hosts, *(each.name for each in self.machines))
            nodes = [str(self.folder / self.site(name) / f"node-{name}.yaml") for name in followers]
            document["scheduler"] = {**document["scheduler"], "nodes": nodes}
        apart = {name: self.center[name] for name in ("broker", "scheduler") if self.place(name) != self.head.name}
        if apart:
            document["endpoints"] = {**document.get("endpoints", {}), **apart}
            listen = {name: address for name, address in listen.items() if name not in apart}
        if self.head.torchrun or self.moves_trainer:
            document["endpoints"] = {**document.get("endpoints", {}), "trainer": self.center["trainer"]}
            del listen["trainer"], listen["weights"]
        if not self.head_rewards:
            del listen["reward"]
        if self.serves_environment:
            listen["environment"] = self._listen("environment")
        return {**document, "listen": {**listen, "public_host": self.host(self.head.name)}}

    def _outside(self, site: str) -> PurePath:
        """A site's folder as `penstock run` finds it without containers: from the deployment's, or the site's own."""
        if self.address is not None:
            return self.folder / site
        return PurePath(site) if self.layout.is_container else self.layout.config

    def _run_inside(self) -> Document:
        """Configuration for the container that follows the run: all services are started beside it."""
        if self.config.get("algorithm", {}).get("reference") == "service" and self.config.get("scorers") != 0:
            raise ConfigError(
                "algorithm.reference: service: --deploy writes no container for scorers; set scorers to 0 and start "
                "them with `penstock serve scorer`, or set algorithm.reference to trainer"
            )
        if self.config.get("algorithm", {}).get("critic") == "service" and "critic" not in self.config["endpoints"]:
            raise ConfigError(
                "algorithm.critic: service: --deploy writes no container for a critic; start it with `penstock serve "
                "critic` and name it in endpoints.critic, or set algorithm.critic to trainer"
            )
        document = self._with_plan(IN_CONTAINERS.config)
        document["run"] = {**document["run"], "dir": str(IN_CONTAINERS.runs)}
        services = ("broker", "scheduler", *(["reward"] if self.head_rewards else []), "trainer")
        attached = {name: self.center[name] for name in services}
        document |= reached_environment(self.config, self.center["environment"])
        return {**document, "endpoints": {**document.get("endpoints", {}), **attached}}

    def _with_plan(self, folder: PurePath) -> Document:
        # Machines know what they emulate; the run starts no generator of its own.
        generator = {key: value for key, value in self.config.get("generator", {}).items() if key != "emulated"}
        plan = {"problem": str(folder / "problem.yaml"), "plan": str(folder / "plan.yaml")}
        scheduler = {**self.config.get("scheduler", {}), **plan}
        return {**self.config, "generator": generator, "scheduler": scheduler}

    def _services(self) -> dict[str, Document | str]:
        redis = {"redis_url": f"redis://127.0.0.1:{PORTS['redis']}/0"}
        documents = {broker_name(index): self._broker(index) | redis for index in range(self.num_brokers)}
        documents["scheduler"] = scheduler_config(self.config, "/runs", listen=self._listen("scheduler"))
        if self.head_rewards:
            documents["reward"] = self._reward(PORTS["reward"])
        found = {
            f"{self.site(self.place(name.partition('-')[0]))}/{name}.yaml": each for name, each in documents.items()
        }
        for name, port in self.host_rewards.items():
            found[f"{self.site(name)}/{host_reward(name)}.yaml"] = {**self._reward(port), "worker_id": f"{name}-reward"}
        return {path: self._service(each) for path, each in found.items()}

    @property
    def host_rewards(self) -> dict[str, int]:
        """The port of each reward worker on a machine without GPUs; several are tried on one host."""
        names = [name for name in self.hosts if name in self.rewards]
        return {name: HOST_REWARD_PORT + index for index, name in enumerate(names)}

    def _broker_address(self, index: int) -> str:
        return f"{self.host(self.place('broker'))}:{broker_port(index)}"

    def _broker(self, index: int) -> Document:
        found = {"listen": f"{self.listen_host}:{broker_port(index)}", "scheduler": self.center["scheduler"]}
        # By these names brokers reach each other.
        return found | ({"advertise": self._broker_address(index)} if self.num_brokers > 1 else {})

    def _host(self, name: str) -> Document:
        """Configuration of `penstock node` on a machine without GPUs, for where it has no containers."""
        folder = self._own_folder(name)
        brokers = [self._broker(index) for index in range(self.num_brokers)]
        scheduler = scheduler_config(self.config, str(folder), listen=self._listen("scheduler"))
        documents = {"brokers": brokers, "scheduler": scheduler}
        here = {key: each for key, each in documents.items() if self.place(key.removesuffix("s")) == name}
        if name in self.host_rewards:
            here["reward"] = self._service(self._reward(self.host_rewards[name] if self.address is None else 0))
        # What starts these machines also ends them all at once, and the trainer still writes its checkpoint.
        wait = {"client_wait_s": LAST_ACT_S["trainer"]} if self.address is None else {}
        return self._service({"node_id": name, "dir": str(folder), **wait, **here})

    def _own_folder(self, machine: str) -> PurePath:
        return self.layout.runs / machine if self.address is None else self.folder / "machines" / machine

    def _reward(self, port: int) -> Document:
        return reward_settings(self.config, broker=self.center["broker"], listen=f"{self.listen_host}:{port}")

    @property
    def moves_critic(self) -> bool:
        """Whether revisions may move the plan's critic."""
        return self.moves_trainer and self.plan.critic is not None

    def _critic_port(self, machine: str) -> int:
        """Of a critic; on one host each machine that may have it has its own."""
        is_only = self.address is None or not self.moves_critic
        return CRITIC_PORT if is_only else FIRST_CRITIC_PORT + [each.name for each in self.machines].index(machine)

    def _critic(self, place: CriticPlace, machine: str, own_folder: PurePath) -> Document:
        config, trainer = self.config, self.config.get("trainer", {})
        stated = {key: trainer[key] for key in ("device", "num_threads") if key in trainer}
        recomputes = trainer.get("gradient_checkpointing")
        if recomputes is None:
            recomputes = self.model.critic.recomputes(place, self.model.nodes)
        run = config["run"]
        return {
            "listen": f"{self.listen_host}:{self._critic_port(machine)}",
            "run_id": run["id"],
            "model_path": str(config["model"]["path"]),
            "state_dir": str(own_folder / "critic" / run["id"]),
            "dtype": config["model"].get("dtype", "auto"),
            "gradient_checkpointing": recomputes,
            **{key: run[key] for key in ("checkpoint_every_steps",) if key in run},
            **({"checkpoint_storage": str(run["checkpoint_storage"])} if self.moves_critic else {}),
            **stated,
        }

    def _scoring(self, machine: str, own_folder: PurePath) -> Document:
        """Sections of a machine's file: for what revisions move, and for what is there."""
        found: Document = {}
        if self.plan.score:
            # Machines that are tried on one host would have the same ports.
            listen = f"{self.listen_host}:{SCORER_PORT if self.address is None else 0}"
            found["scorer"] = self._service(scorer_settings(self.config, broker=self.center["broker"], listen=listen))
        if (place := self.plan.critic) is not None and (self.moves_critic or machine == place.node):
            found["critic"] = self._service(self._critic(place, machine, own_folder))
        # The head's without a GPU is started with the run.
        if self.plan.reward_gpus or (machine != self.head.name and (self.rewards or self.may_add_rewards)):
            port = GPU_REWARD_PORT if self.plan.reward_gpus else PORTS["reward"]
            found["reward"] = self._service(self._reward(port if self.address is None else 0))
        return found

    def _node(self, machine: Machine) -> Document:
        """Configuration of a machine's `penstock node`."""
        is_tried_here = self.address is not None
        own_folder = self._own_folder(machine.name)
        run, stated = self.config, self.config.get("generator", {})
        generator: Document = {
            "listen": f"{self.listen_host}:{machine.first_port}",
            "run_id": run["run"]["id"],
            "broker": self.center["broker"],
            "weights": self.center["trainer"],
            "model_path": str(run["model"]["path"]),
            "dtype": run["model"].get("dtype", "auto"),
            "cache_dir": str(own_folder / "cache"),
            "engine": {key: value for key, value in stated.items() if key in engine_keys()},
            **reached_environment(run, self.center["environment"]),
        }
        if self.is_emulated:
            # A small model used for trials may state a shorter context in its folder.
            longest = run.get("data", {}).get("max_prompt_tokens", 512) + run["sampling"]["max_new_tokens"]
            generator["engine"]["max_context_tokens"] = math.ceil(longest)
            site_folder = self.folder / machine.site if is_tried_here else self.layout.config
            lengths = {"lengths": str(site_folder / LENGTHS_FILE)}
            generator["emulated"] = {**lengths, **stated.get("emulated", {}), "gpu": machine.kind.gpu}
        if machine.site != self.head.site:
            generator["site"] = machine.site
        document = {
            "node_id": machine.name,
            "site": machine.site,
            "gpu": machine.kind.gpu,
            "gpus": machine.kind.gpus,
            **({"first_gpu": first} if (first := self.first_gpu(machine.name)) else {}),
            "price_per_hour": machine.kind.price_per_gpu_hour * machine.kind.gpus,
            "scheduler": self.center["scheduler"],
            "address": self.host(machine.name),
            "dir": str(own_folder),
            "generator": generator,
            **self._scoring(machine.name, own_folder),
            **({"trainer": self._service(self._moving_trainer(machine.name))} if self.moves_trainer else {}),
        }
        return self._service(document)

    def _trainer(self) -> Document:
        roots = [str(DATA), str(self.layout.runs)] if self._is_far else trainer_roots(self.config)
        return {
            "listen": self._listen("trainer"),
            "weights_listen": self._listen("weights"),
            "weights_url": self.center["weights"],
            "state_dir": str(self.layout.runs / ".trainers"),
            "allowed_roots": roots,
            "allowed_storage": [str(source) for source in run_sources(self.config) if looks_like_address(source)],
        }

    def _trainer_port(self, machine: str) -> int:
        """Port of a trainer that moves, before that of its weights; on one host each machine has its own."""
        if self.address is None:
            return PORTS["trainer"]
        return FIRST_MOVED_PORT + 2 * [each.name for each in self.machines].index(machine)

    def _moving_trainer(self, machine: str) -> Document:
        """The section of a machine's file for the trainer, which keeps the run in a folder of the machine's own."""
        common, port = self._trainer(), self._trainer_port(machine)
        del common["state_dir"]
        # Apart from the console's own folder of the run, on the head.
        runs = self.layout.runs / "moved" if self.address is None else self.folder / "machines" / machine / "runs"
        return {
            **common,
            "listen": f"{self.listen_host}:{port}",
            "weights_listen": f"{self.listen_host}:{port + 1}",
            "weights_url": f"{self.host(machine)}:{port + 1}",
            "run_dir": str(runs / self.config["run"]["id"]),
            "checkpoint_storage": str(self.config["run"]["checkpoint_storage"]),
            "rendezvous_port": RENDEZVOUS_PORT,
        }

    @property
    def _is_far(self) -> bool:
        """Whether services run in containers on other machines than this one."""
        return self.layout.is_container and self.address is None

    def _machine(self, name: str) -> Document:
        """What the machine's check is to find there."""
        config = self.config
        trains = next((each for each in self.trainers if each.name == name), None)
        generates = next((each for each in self.machines if each.name == name), None)
        paths = {} if name in self.hosts and name not in self.rewards else {"model.path": config["model"]["path"]}
        if name == self.head.name or (self.moves_trainer and name not in self.hosts):
            paths |= {setting: holder[key] for setting, holder, key in data_files(config.get("data", {}))}
        if (name == self.head.name and self.head_rewards) or (
            self.rewards and (generates is not None or name in self.host_rewards)
        ):
            paths |= {setting: holder[key] for setting, holder, key in canary_files(config)}
        teacher = config["algorithm"].get("reference_path")
        if self.plan.score and generates is not None and teacher is not None:
            paths["algorithm.reference_path"] = teacher
        runs = self.layout.runs if self._is_far or trains is None else PurePath(config["run"].get("dir", "runs"))
        document: Document = {
            "name": name,
            "run_id": config["run"]["id"],
            "site": self.site(name),
            "role": self.role(name),
            "more_roles": list(self.more_roles(name)),
            "host": self.host(name),
            "has_certificates": self.has_certificates,
            "readable": {key: str(path) for key, path in paths.items()},
            "writable": {"run.dir" if trains is not None else "dir": str(runs)},
        }
        if name in self.hosts:
            return document
        if (trains is not None or self.moves_trainer) and (
            storage := config["run"].get("checkpoint_storage")
        ) is not None:
            document["writable"]["run.checkpoint_storage"] = str(storage)
        if self.is_emulated or config.get("trainer", {}).get("device") == "cpu":
            return document
        kind = node_classes(self.model.problem)[name]
        gpus = kind.gpus if generates is not None or trains is None else trains.gpus
        if generates is not None and (first := self.first_gpu(name)):
            # It is checked in every pod, each of which has some of them.
            gpus = min(first, kind.gpus - first)
        memory_gb = self.model.problem.gpu_types[kind.gpu].hbm_GB
        return {**document, "gpu": kind.gpu, "gpus": gpus, "gpu_memory_gb": memory_gb}
