"""Chooses the machines of a deployment that generate, and what their emulated GPUs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config import ConfigError
from services.generator.emulation.config import EmulatedConfig
from services.generator.emulation.hardware import GPUS, MODELS
from services.scheduler.problem.plan_document import PlanDocument, node_classes
from services.scheduler.problem.problem import NodeClass, Problem
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
    kind: NodeClass
    """Its entry in the problem."""
    first_port: int

    @property
    def site(self) -> str:
        """Its region."""
        return self.kind.region


def machines(problem: Problem, plan: PlanDocument, *, is_one_host: bool, moves_trainer: bool = False) -> list[Machine]:
    """All machines except those whose GPUs all train and that have neither the critic nor a reward worker.

    Revisions may use GPUs that the plan leaves idle; where they move the trainer, all.
    """
    training = {share.node: share.gpus for share in plan.train}
    found, next_port = [], FIRST_GENERATOR_PORT
    for name, node in node_classes(problem).items():
        only_trains = training.get(name) == node.gpus and not moves_trainer
        has_critic = plan.critic is not None and name == plan.critic.node
        if only_trains and not has_critic and (name == plan.train[0].node or name not in plan.reward):
            continue
        found.append(Machine(name=name, kind=node, first_port=next_port))
        next_port += 2 * node.gpus if is_one_host else 0
        if next_port > MAX_PORT:
            raise ConfigError("--address: one address does not have ports for this many machines; leave --address out")
    return found


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
