"""Turns a plan into the files that start it: a compose file for each site and a configuration for each service.

Machines are reached under their own names, which must resolve where they are used (or all under one address, to try a
deployment on one machine). Each runs `penstock node`, which starts the generators that the plan assigns to it and
follows revisions. The first machine of the training pool is the head: broker, scheduler, reward worker and trainer run
there, in containers by its site's compose file, or without containers by `penstock run` and the run.yaml beside the
sites.

Every service listens on all addresses with mutual TLS and a certificate for each machine (README.md says how to make
them); plain text is used only on loopback, or if the run's configuration says `insecure: true`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePath

import yaml

from console.config.config import parse_run_config
from console.config.derive import training_config
from console.deploy.compose import compose_file
from console.deploy.nodes import LENGTHS_FILE, Machine, drawn_lengths, emulation, machines
from console.deploy.readme import readme
from console.deploy.trainers import processes, training_machines
from console.node.config import NodeConfig
from penstock.config import ConfigError, Document, validate
from penstock.security.plain_text import is_local
from services.generator.engines.registry import engine_keys
from services.scheduler.cost_model.reference import CostModel
from services.scheduler.problem.plan_document import PlanDocument
from services.scheduler.problem.problem import Problem

PORTS = {"redis": 7300, "broker": 7301, "reward": 7303, "trainer": 7304, "weights": 7305, "scheduler": 7306}
PLAIN_RUN: Document = {"model": {"path": "/data/model"}, "data": {"train": "/data/train.jsonl"}}
"""The default run configuration: paths that the user has to fill."""
_LOOPBACK = "127.0.0.1"
_IN_CONTAINERS = PurePath("/config")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def write_deployment(
    folder: Path, model: CostModel, plan: PlanDocument, *, run: Document = PLAIN_RUN, address: str | None = None
) -> list[Path]:
    """Write all files into a folder that is new or empty; returns their paths. Raises ConfigError.

    `run` is the run's own configuration; `address` reaches every machine (None: each is reached under its own name).
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--deploy: {folder} is not an empty folder; name a new one")
    files = deployment(model, plan, run=run, address=address, folder=folder.expanduser().absolute())
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8")
    return [folder / name for name in files]


def deployment(
    model: CostModel, plan: PlanDocument, *, run: Document, address: str | None, folder: Path
) -> dict[str, Document | str]:
    """Every file's document or text, by its path in `folder`; all are validated. Raises ConfigError."""
    return _Deployment(model, plan, run=run, address=address, folder=folder).files()


class _Deployment:
    def __init__(
        self, model: CostModel, plan: PlanDocument, *, run: Document, address: str | None, folder: Path
    ) -> None:
        _check_names(model.problem)
        self.model, self.plan, self.address, self.folder = model, plan, address, folder
        self.is_emulated = run.get("generator", {}).get("engine") == "emulated"
        self.config = _run_config(model, plan, run, is_emulated=self.is_emulated)
        """The run's settings, with those that the plan was computed for."""
        self.machines = machines(model.problem, plan, is_one_host=address is not None)
        self.trainers = training_machines(model, plan, address or plan.train[0].node)
        self.head = self.trainers[0]
        self.listen_host = _LOOPBACK if address is not None and is_local(f"{address}:1") else "0.0.0.0"
        self.is_insecure = bool(self.config.get("insecure", False))
        self.has_certificates = not self.is_insecure and self.listen_host != _LOOPBACK
        self.center = {name: f"{self._host(self.head.name)}:{port}" for name, port in PORTS.items()}
        """Addresses of the run's services."""

    def files(self) -> dict[str, Document | str]:
        home = self.head.site
        runs = {"run.yaml": self._run_outside(), f"{home}/run.yaml": self._run_inside()}
        for name, document in runs.items():
            training_config(parse_run_config(document, source=name), broker="127.0.0.1:1", source=name)
        found: dict[str, Document | str] = {
            **runs,
            f"{home}/problem.yaml": self.model.problem.model_dump(mode="json", by_alias=True, exclude_none=True),
            f"{home}/plan.yaml": self.plan.model_dump(mode="json"),
            **self._services(home),
        }
        if self.has_certificates:
            found["README.md"] = readme(self.config["run"]["id"], self.machines, self.trainers)
        for machine in self.machines:
            document = self._node(machine)
            validate(NodeConfig, document, source=machine.name)
            found[f"{machine.site}/node-{machine.name}.yaml"] = document
        sites = dict.fromkeys((*(each.site for each in self.trainers), *(each.site for each in self.machines)))
        for site in sites:
            found |= self._site(site, is_home=site == home)
        return found

    def _service(self, document: Document) -> Document:
        return {"insecure": True, **document} if self.is_insecure else document

    def _listen(self, name: str) -> str:
        return f"{self.listen_host}:{PORTS[name]}"

    def _host(self, machine: str) -> str:
        return self.address or machine

    def _run_outside(self) -> Document:
        """Configuration for `penstock run` on the head; it attaches to the trainer if torchrun starts that."""
        listen = {name: self._listen(name) for name in ("broker", "scheduler", "reward", "trainer", "weights")}
        document = self._with_plan(self.folder / self.head.site)
        if self.address is not None:
            nodes = [str(self.folder / each.site / f"node-{each.name}.yaml") for each in self.machines]
            document["scheduler"] = {**document["scheduler"], "nodes": nodes}
        if self.head.torchrun:
            document["endpoints"] = {**document.get("endpoints", {}), "trainer": self.center["trainer"]}
            del listen["trainer"], listen["weights"]
        return {**document, "listen": {**listen, "public_host": self._host(self.head.name)}}

    def _run_inside(self) -> Document:
        """Configuration for the container that follows the run: all services are started beside it."""
        document = self._with_plan(_IN_CONTAINERS)
        attached = {name: self.center[name] for name in ("broker", "scheduler", "reward", "trainer")}
        return {**document, "endpoints": {**document.get("endpoints", {}), **attached}}

    def _with_plan(self, folder: PurePath) -> Document:
        # Machines know what they emulate; the run starts no generator of its own.
        generator = {key: value for key, value in self.config.get("generator", {}).items() if key != "emulated"}
        plan = {"problem": str(folder / "problem.yaml"), "plan": str(folder / "plan.yaml")}
        scheduler = {**self.config.get("scheduler", {}), **plan}
        return {**self.config, "generator": generator, "scheduler": scheduler}

    def _services(self, home: str) -> dict[str, Document | str]:
        return {
            f"{home}/broker.yaml": self._service(
                {
                    "listen": self._listen("broker"),
                    "redis_url": f"redis://127.0.0.1:{PORTS['redis']}/0",
                    "scheduler": self.center["scheduler"],
                }
            ),
            f"{home}/scheduler.yaml": self._service({"listen": self._listen("scheduler"), **self._scheduler()}),
            f"{home}/reward.yaml": self._service(
                {
                    "listen": self._listen("reward"),
                    "run_id": self.config["run"]["id"],
                    "broker": self.center["broker"],
                    "tokenizer_path": self.config["model"]["path"],
                    "reward": _reward(self.config),
                }
            ),
        }

    def _scheduler(self) -> Document:
        """What the run states of its scheduler, in that service's own fields."""
        stated = self.config.get("scheduler", {})
        same = {key: stated[key] for key in ("heartbeat_interval_s", "cost_model") if key in stated}
        fields = {"model_path": "length_model", "pairs_file": "length_pairs"}
        lengths = {own: stated[key] for own, key in fields.items() if stated.get(key) is not None}
        if lengths:
            same["lengths"] = {**lengths, "state_dir": f"/runs/{self.config['run']['id']}/lengths"}
        return same

    def _node(self, machine: Machine) -> Document:
        """Configuration of a machine's `penstock node`."""
        is_tried_here = self.address is not None
        own_folder = self.folder / "machines" / machine.name if is_tried_here else PurePath("/runs", machine.name)
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
        }
        if self.is_emulated:
            # A small model used for trials may state a shorter context in its folder.
            longest = run.get("data", {}).get("max_prompt_tokens", 512) + run["sampling"]["max_new_tokens"]
            generator["engine"]["max_context_tokens"] = math.ceil(longest)
            site_folder = self.folder / machine.site if is_tried_here else _IN_CONTAINERS
            lengths = {"lengths": str(site_folder / LENGTHS_FILE)}
            generator["emulated"] = {**lengths, **stated.get("emulated", {}), "gpu": machine.kind.gpu}
        if machine.site != self.head.site:
            generator["site"] = machine.site
        document = {
            "node_id": machine.name,
            "site": machine.site,
            "gpu": machine.kind.gpu,
            "gpus": machine.kind.gpus,
            "price_per_hour": machine.kind.price_per_gpu_hour * machine.kind.gpus,
            "scheduler": self.center["scheduler"],
            "address": self._host(machine.name),
            "dir": str(own_folder),
            "generator": generator,
        }
        return self._service(document)

    def _site(self, site: str, *, is_home: bool) -> dict[str, Document | str]:
        here = [each for each in self.machines if each.site == site]
        trainers = [each for each in self.trainers if each.site == site]
        head = self.head.name if is_home else None
        found: dict[str, Document | str] = {
            f"{site}/docker-compose.yml": compose_file(
                here,
                trainers,
                head=head,
                ports=PORTS,
                is_emulated=self.is_emulated,
                has_certificates=self.has_certificates,
            )
        }
        if trainers:
            trainer = {
                "listen": self._listen("trainer"),
                "weights_listen": self._listen("weights"),
                "weights_url": self.center["weights"],
                "allowed_roots": _trainer_roots(self.config),
            }
            found[f"{site}/trainer.yaml"] = self._service(trainer)
        if here and self.is_emulated:
            found[f"{site}/{LENGTHS_FILE}"] = drawn_lengths(self.model.problem)
        return found


def _check_names(problem: Problem) -> None:
    for index, node in enumerate(problem.nodes):
        for key, value in (("name", node.name), ("region", node.region)):
            if not _HOST.fullmatch(value):
                raise ConfigError(
                    f"nodes.{index}.{key}: {value!r} cannot name a {'machine' if key == 'name' else 'folder'} of a "
                    "deployment; use letters, digits, dots, dashes and underscores"
                )


def _run_config(model: CostModel, plan: PlanDocument, run: Document, *, is_emulated: bool) -> Document:
    """The run's configuration with the settings that the plan was computed for."""
    problem = model.problem
    workload = problem.workload
    endpoints = {key: value for key, value in run.get("endpoints", {}).items() if key != "generators"}
    config: Document = {
        **run,
        "run": {"id": re.sub(r"[^A-Za-z0-9._-]", "-", problem.id), **run.get("run", {})},
        "algorithm": {
            **({"name": "ppo"} if _trains_a_critic(problem) else {}),
            **run.get("algorithm", {}),
            "group_size": workload.group_size,
            "prompts_per_step": workload.prompts_per_step,
            "max_staleness": workload.staleness,
        },
        "sampling": {**run.get("sampling", {}), "max_new_tokens": math.ceil(workload.output_len.longest)},
        "endpoints": endpoints,
    }
    if is_emulated:
        # The trainer is real, on this machine's hardware: it keeps the run's settings.
        emulated = emulation(problem, run["generator"].get("emulated", {}))
        return {**config, "generator": {**run["generator"], "emulated": emulated}}
    return {**config, "trainer": {**run.get("trainer", {}), "processes": processes(model, plan)}}


def _trains_a_critic(problem: Problem) -> bool:
    """Whether more than the policy is trained."""
    return sum(task.kind == "train" for task in problem.workload.train_tasks) > 1


def _reward(config: Document) -> Document:
    stated = config.get("reward", {})
    return {"model": stated} if isinstance(stated, str) else stated


def _trainer_roots(config: Document) -> list[str]:
    """The paths that the run's trainer reads and writes, as the run names them."""
    data = config.get("data", {})
    paths = (config["run"].get("dir", "runs"), config["model"]["path"], data.get("train"), data.get("eval"))
    return [str(path) for path in paths if path is not None]
