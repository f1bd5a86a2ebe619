"""From a plan to what starts it: for each site a compose file and a configuration for each service.

Machines are reached under their own names, which must resolve where they are used (or all under one address, to try a
deployment on one machine). Every replica of the plan is a generator of its own, with its GPUs, its degree and the batch
that the plan counts on. The first machine of the training pool is the head: broker, scheduler, reward worker and
trainer run there, in containers by its site's compose file, or without any by `penstock run` and the run.yaml beside
the sites.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from console.config import parse_run_config
from console.deployment_compose import compose_file
from penstock.config import ConfigError, Document, validate
from services.generator.config import EngineConfig, GeneratorConfig
from services.scheduler.cost_model.rm1 import Rm1, Score
from services.scheduler.plan_document import PlanDocument
from services.scheduler.problem import Problem

PORTS = {"redis": 7300, "broker": 7301, "reward": 7303, "trainer": 7304, "weights": 7305, "scheduler": 7306}
FIRST_GENERATOR_PORT = 7400
"""The first generator's; each takes two, the second for relaying weights inside its site."""
PLAIN_RUN: Document = {"model": {"path": "/data/model"}, "data": {"train": "/data/train.jsonl"}}
"""Of which run it is, when nobody says: paths that somebody has to fill."""
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedGenerator:
    """One replica of the plan."""

    name: str
    machine: str
    site: str
    gpu: str
    gpus: tuple[int, ...]
    """Indices on its machine; as many as its tensor-parallel degree."""
    batch: int
    """Sequences that it decodes at once."""
    port: int


def write_deployment(
    folder: Path, rm1: Rm1, plan: PlanDocument, *, run: Document = PLAIN_RUN, address: str | None = None
) -> list[Path]:
    """Write all files into a folder that is new or empty; the files. Raises ConfigError.

    `run` is the run's own configuration; `address` reaches every machine, each is reached under its name when None.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--deploy: {folder} is not an empty folder; name a new one")
    files = deployment(rm1, plan, run=run, address=address)
    for name, document in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return [folder / name for name in files]


def deployment(rm1: Rm1, plan: PlanDocument, *, run: Document, address: str | None) -> dict[str, Document]:
    """Every file's document, by its path in the folder; all are checked. Raises ConfigError."""
    _check_names(rm1.problem)
    head = plan.train[0]
    hosts = {machine: address or machine for machine in rm1.nodes}
    generators = list(_generators(rm1, plan))
    config = _run_config(rm1.problem, run, [f"{hosts[each.machine]}:{each.port}" for each in generators])
    home = rm1.nodes[head.node].region
    center = {name: f"{hosts[head.node]}:{port}" for name, port in PORTS.items()}
    attached = {name: center[name] for name in ("broker", "scheduler", "reward", "trainer")}
    started = {name: f"0.0.0.0:{PORTS[name]}" for name in (*attached, "weights")}
    inside = {**config, "endpoints": {**config["endpoints"], **attached}}
    files: dict[str, Document] = {
        "run.yaml": {**config, "listen": {**started, "public_host": hosts[head.node]}},
        f"{home}/run.yaml": inside,
        f"{home}/broker.yaml": {
            "listen": started["broker"],
            "redis_url": f"redis://127.0.0.1:{PORTS['redis']}/0",
            "scheduler": center["scheduler"],
        },
        f"{home}/scheduler.yaml": {"listen": started["scheduler"]},
        f"{home}/reward.yaml": {
            "listen": started["reward"],
            "run_id": config["run"]["id"],
            "broker": center["broker"],
            "reward": _reward(config),
        },
        f"{home}/trainer.yaml": {
            "listen": started["trainer"],
            "weights_listen": started["weights"],
            "weights_url": f"http://{center['weights']}",
        },
    }
    for name in ("run.yaml", f"{home}/run.yaml"):
        parse_run_config(files[name], source=name)
    for each in generators:
        document = _generator_config(each, config, center, hosts[each.machine], is_remote=each.site != home)
        validate(GeneratorConfig, document, source=each.name)
        files[f"{each.site}/{each.name}.yaml"] = document
    sites = dict.fromkeys((home, *(each.site for each in generators)))
    is_emulated = config.get("generator", {}).get("engine") == "emulated"
    for site in sites:
        here = [each for each in generators if each.site == site]
        files[f"{site}/docker-compose.yml"] = compose_file(
            here, (head.node, head.gpus) if site == home else None, PORTS, is_emulated=is_emulated
        )
    return files


def _check_names(problem: Problem) -> None:
    for index, node in enumerate(problem.nodes):
        for key, value in (("name", node.name), ("region", node.region)):
            if not _HOST.fullmatch(value):
                raise ConfigError(
                    f"nodes.{index}.{key}: {value!r} cannot name a {'machine' if key == 'name' else 'folder'} of a "
                    "deployment; use letters, digits, dots, dashes and underscores"
                )


def _generators(rm1: Rm1, plan: PlanDocument) -> Iterator[PlacedGenerator]:
    """Every replica, its GPUs after those of its machine that train."""
    score = rm1.score(plan)
    assert isinstance(score, Score), "a plan that was checked can run"
    taken = Counter({share.node: share.gpus for share in plan.train})
    numbers: Counter[str] = Counter()
    port = FIRST_GENERATOR_PORT
    for generation in score.generation:
        replicas = generation.replicas
        node = rm1.nodes[replicas.node]
        for _ in range(replicas.count):
            first = taken[replicas.node]
            taken[replicas.node] += replicas.tp
            yield PlacedGenerator(
                name=f"gen-{replicas.node}-{numbers[replicas.node]}",
                machine=replicas.node,
                site=node.region,
                gpu=node.gpu,
                gpus=tuple(range(first, first + replicas.tp)),
                batch=generation.state.batch if generation.state is not None else 1,
                port=port,
            )
            numbers[replicas.node] += 1
            port += 2


def _run_config(problem: Problem, run: Document, generators: list[str]) -> Document:
    """The run's configuration with what the plan was computed for, and its generators."""
    workload = problem.workload
    return {
        **run,
        "run": {"id": re.sub(r"[^A-Za-z0-9._-]", "-", problem.id), **run.get("run", {})},
        "algorithm": {
            **run.get("algorithm", {}),
            "group_size": workload.group_size,
            "prompts_per_step": workload.prompts_per_step,
            "max_staleness": workload.staleness,
        },
        "sampling": {**run.get("sampling", {}), "max_new_tokens": math.ceil(workload.output_len.longest)},
        "endpoints": {**run.get("endpoints", {}), "generators": generators},
    }


def _reward(config: Document) -> Document:
    stated = config.get("reward", {})
    return {"model": stated} if isinstance(stated, str) else stated


def _generator_config(
    each: PlacedGenerator, run: Document, center: Mapping[str, str], host: str, *, is_remote: bool
) -> Document:
    stated = {key: value for key, value in run.get("generator", {}).items() if key in EngineConfig.model_fields}
    engine: dict[str, Any] = {
        **stated,
        "tensor_parallel": len(each.gpus),
        "max_concurrent_samples": max(1, min(each.batch, 8192)),
    }
    document: Document = {
        "listen": f"0.0.0.0:{each.port}",
        "generator_id": each.name,
        "run_id": run["run"]["id"],
        "broker": center["broker"],
        "weights": center["trainer"],
        "model_path": run["model"]["path"],
        "dtype": run["model"].get("dtype", "auto"),
        "cache_dir": f"/run/penstock/{each.name}",
        "engine": engine,
    }
    if is_remote:
        # Of a site apart from the trainer, one generator fetches each version and the others get it from there.
        relay = each.port + 1
        document |= {"site": each.site, "relay_listen": f"0.0.0.0:{relay}", "relay_url": f"http://{host}:{relay}"}
    if engine.get("engine") == "emulated":
        document["emulated"] = {"gpu": each.gpu}
    return document
