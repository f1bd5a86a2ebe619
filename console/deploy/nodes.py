"""Configures the machines of a deployment: `penstock node` on each, and its emulated GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from penstock.config import ConfigError, Document
from services.generator.emulation.config import EmulatedConfig
from services.generator.emulation.hardware import GPUS, MODELS
from services.generator.engines.registry import engine_keys
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import Problem
from simulator.virtual_run.drawn_lengths import draw

FIRST_GENERATOR_PORT = 7400
"""First port of a machine; the generator that begins at GPU i takes this + 2 i, and the next port to relay weights."""
MAX_PORT = 65535
LENGTHS_FILE = "lengths.txt"
NUM_LENGTHS = 4096
"""Lengths drawn from the problem's distribution, for emulated GPUs to replay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine that may generate."""

    name: str
    site: str
    gpu: str
    gpus: int
    price_per_hour: float
    first_port: int


def machines(problem: Problem, plan: PlanDocument, *, is_one_host: bool) -> list[Machine]:
    """All machines except those whose GPUs all train: revisions may use GPUs that the plan leaves idle."""
    training = {share.node: share.gpus for share in plan.train}
    found, next_port = [], FIRST_GENERATOR_PORT
    for name, node in node_classes(problem).items():
        if training.get(name) == node.gpus:
            continue
        found.append(
            Machine(
                name=name,
                site=node.region,
                gpu=node.gpu,
                gpus=node.gpus,
                price_per_hour=node.price_per_gpu_hour * node.gpus,
                first_port=next_port,
            )
        )
        next_port += 2 * node.gpus if is_one_host else 0
        if next_port > MAX_PORT:
            raise ConfigError("--address: one address does not have ports for this many machines; leave --address out")
    return found


def node_document(
    machine: Machine,
    run: Document,
    center: Mapping[str, str],
    *,
    listen_host: str,
    address: str,
    folder: PurePath,
    config_folder: PurePath,
    is_remote: bool,
) -> Document:
    """The configuration of a machine's `penstock node`.

    Args:
        machine: The machine.
        run: The run's configuration.
        center: Address of the run's services.
        listen_host: Host on which its generators listen.
        address: Address of the machine.
        folder: The machine's own folder, for logs and weights.
        config_folder: Folder of the site's files.
        is_remote: Whether its site is not the trainer's.
    """
    stated = run.get("generator", {})
    engine = {key: value for key, value in stated.items() if key in engine_keys()}
    is_emulated = engine.get("engine") == "emulated"
    generator: Document = {
        "listen": f"{listen_host}:{machine.first_port}",
        "run_id": run["run"]["id"],
        "broker": center["broker"],
        "weights": center["trainer"],
        "model_path": str(run["model"]["path"]),
        "dtype": run["model"].get("dtype", "auto"),
        "cache_dir": str(folder / "cache"),
        "engine": {**engine, **(_context(run) if is_emulated else {})},
    }
    if is_emulated:
        lengths = {"lengths": str(config_folder / LENGTHS_FILE)}
        generator["emulated"] = {**lengths, **stated.get("emulated", {}), "gpu": machine.gpu}
    if is_remote:
        generator["site"] = machine.site
    return {
        "node_id": machine.name,
        "site": machine.site,
        "gpu": machine.gpu,
        "gpus": machine.gpus,
        "price_per_hour": machine.price_per_hour,
        "scheduler": center["scheduler"],
        "address": address,
        "dir": str(folder),
        "generator": generator,
    }


def emulation(problem: Problem, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The `emulated` section of a run on emulated GPUs, with the model named. Raises ConfigError."""
    unknown = sorted({node.gpu for node in problem.nodes} - GPUS.keys())
    if unknown:
        raise ConfigError(f"gpu_types: no engine can emulate {', '.join(unknown)}; there are {', '.join(GPUS)}")
    shape = problem.model
    alike = (
        name
        for name, known in MODELS.items()
        if (known.num_layers, known.hidden_size, known.num_query_heads) == (shape.layers, shape.hidden, shape.q_heads)
    )
    model = stated.get("model") or next(alike, None)
    if model is None:
        raise ConfigError(
            f"generator.emulated.model: the problem's model is none of {', '.join(MODELS)}; name the one to emulate"
        )
    section = {**stated, "model": model}
    known = EmulatedConfig.model_fields
    if wrong := sorted(section.keys() - known):
        raise ConfigError(f"generator.emulated.{wrong[0]}: unknown; there are {', '.join(known)}")
    return section


def drawn_lengths(problem: Problem) -> str:
    """Completion lengths by the problem's distribution, one per line."""
    lengths = draw(problem.workload.output_len, NUM_LENGTHS, 0)
    return "".join(f"{max(1, round(float(length)))}\n" for length in lengths)


def _context(run: Document) -> dict[str, int]:
    """Longest prompt and completion: a small model used for trials may state less in its folder."""
    longest = run.get("data", {}).get("max_prompt_tokens", 512) + run["sampling"]["max_new_tokens"]
    return {"max_context_tokens": math.ceil(longest)}
