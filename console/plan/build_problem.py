"""Builds a planning problem from an inventory of probes, a model's folder, lengths, and a run's configuration.

    probes -> cluster, reward    config.json -> model    recording or rows -> lengths    RUN.yaml and flags -> workload

The document goes through the same checks as a problem that a person wrote. What is missing is asked for in one list:
the field, why it is missing, and what gives it. Fields that nothing here measures keep their defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from console.config.config import RunConfig, load_run_config
from console.node.config import NodeConfig, device_differences, read_nodes
from console.plan.cluster import cluster_of
from console.plan.lengths import Lengths, output_lengths, read_lengths
from console.plan.model_section import decode_constants, model_section, offload_constants, pass_constants
from console.plan.reward_section import reward_section
from console.probe.probe_file import Probe, read_inventory
from penstock.config import ConfigError, Document, validate
from penstock.model.model_shape import read_numbers
from penstock.names import is_run_id
from penstock.reasoning_gym.source import ReasoningGymSource
from penstock.storage.fetched import fetched
from services.generator.engines.registry import ENGINES
from services.scheduler.problem.problem import SCHEMA, Problem

MAX_STAGES = 8
"""Most stages of a replica that plans of probed machines have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the problem comes from; what is None is taken from the run, if there is one."""

    inventory: Path | None
    """Folder of probes; None without one."""
    model: Path | None = None
    data: Path | None = None
    run: Path | None = None
    completion_tokens: int | None = None
    prompts_per_step: int | None = None
    group_size: int | None = None
    staleness: int | None = None
    reward_rate: float | None = None
    """Samples per second that one reward worker scores."""
    write_problem: Path | None = None
    """File to write the problem to."""

    @property
    def unused(self) -> list[str]:
        """Flags that are given and mean nothing without an inventory."""
        names = (each.name for each in fields(self) if each.name not in ("inventory", "run"))
        return [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProblem:
    """A problem, and what to know about it."""

    problem: Problem
    document: Document
    """What was found: fields that keep their defaults are left out."""
    notes: tuple[str, ...]
    """One line each."""


def build_problem(inventory: Path, sources: Sources) -> BuiltProblem:
    """Build and check it. Raises ConfigError, one line for each problem or missing field."""
    probes = read_inventory(inventory)
    run = None if sources.run is None else load_run_config(sources.run)
    cluster = cluster_of(list(probes.values()))
    missing, notes = cluster.missing, cluster.notes
    if run is not None:
        missing += _on_cpus(run, list(probes.values()))
        missing += _differences(run, [probe for probe in probes.values() if probe.accelerators is not None])
    model = sources.model or (run.model.folder if run is not None else None)
    if model is None:
        missing.append("model: not given; name its Hugging Face folder with --model, or a run with --run")
    section = {} if model is None else model_section(model, missing)
    document: Document = {
        "id": _id(model),
        "schema": SCHEMA,
        "notes": [f"probed: {probe.name}, {probe.measured_at.isoformat()}" for probe in probes.values()],
        "gpu_types": cluster.gpu_types,
        "nodes": cluster.nodes,
        "hosts": cluster.hosts,
        "links": cluster.links,
        "model": section,
        "workload": {
            **_workload(sources, run, model, missing, notes),
            **reward_section(list(probes.values()), run, stated=sources.reward_rate, missing=missing, notes=notes),
        },
        "cost_model": {
            **decode_constants(list(probes.values()), notes),
            **pass_constants(list(probes.values()), notes),
            **offload_constants(list(probes.values())),
            **_run_constants(run, notes),
        },
        "constraints": _constraints(run),
    }
    if missing:
        raise ConfigError("\n".join(missing))
    problem = validate(Problem, document, source=str(inventory))
    return BuiltProblem(problem=problem, document=document, notes=tuple(notes))


def write_problem(path: Path, built: BuiltProblem) -> None:
    """Write the problem as YAML, for `penstock plan FILE`. Raises ConfigError."""
    text = "# Built by penstock plan --inventory; docs/planning.md describes every key.\n"
    text += yaml.safe_dump(built.document, sort_keys=False, default_flow_style=None, width=120)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write-problem: {path} cannot be written: {error.strerror}; name another file") from error


def _id(model: Path | None) -> str:
    name = "problem" if model is None else model.expanduser().absolute().name
    return name if is_run_id(name) else "problem"


def _workload(
    sources: Sources, run: RunConfig | None, model: Path | None, missing: list[str], notes: list[str]
) -> Document:
    algorithm = None if run is None else run.algorithm
    settings = (
        ("prompts_per_step", sources.prompts_per_step, None if algorithm is None else algorithm.prompts_per_step),
        ("group_size", sources.group_size, None if algorithm is None else algorithm.group_size),
        ("staleness", sources.staleness, None if algorithm is None else algorithm.max_staleness),
    )
    found: Document = {}
    for key, stated, default in settings:
        value = default if stated is None else stated
        if value is None:
            flag = f"--{key.replace('_', '-')}"
            missing.append(f"workload.{key}: how the run trains is not known; give {flag}, or the run with --run")
        else:
            found[key] = value
    found["train_tasks"] = _train_tasks(run, model)
    return {**found, **_lengths(sources, run, model, missing, notes)}


def _rows(run: RunConfig | None, missing: list[str]) -> Path | None:
    """The training rows of a run of one file, on this machine; None, with what is missing, of any other."""
    found = () if run is None else run.data.train_sources
    if len(found) == 1 and not isinstance(found[0].path, ReasoningGymSource):
        return fetched("data.train", found[0].path)
    what = f"has {len(found)} sources" if len(found) > 1 else "names a task"
    why = f"data.train {what}; give --data a recording of such a run"
    nothing = "no data; give --data a recording or rows of prompts, or a run with --run"
    missing.append(f"workload.prompt_len: {why if found else nothing}")
    return None


def _lengths(
    sources: Sources, run: RunConfig | None, model: Path | None, missing: list[str], notes: list[str]
) -> Document:
    data = sources.data or _rows(run, missing)
    if data is None or model is None:
        return {}
    longest = None if run is None else run.sampling.max_new_tokens
    lengths = read_lengths(data, model, max_prompt_tokens=None if run is None else run.data.max_prompt_tokens)
    found: Document = {"prompt_len": lengths.prompt_tokens, **_environment(run, lengths, notes)}
    if sources.completion_tokens is not None:
        fixed = sources.completion_tokens
        notes.append(f"all completions are planned as {fixed} tokens long; a recording would show how lengths spread")
        return {**found, "output_len": {"type": "fixed", "length": fixed, "max": max(fixed, longest or 0)}}
    if not lengths.completion_tokens:
        missing.append(
            f"workload.output_len: {data} holds prompts without completions; give --data the recording of a run "
            "(record: true), or --completion-tokens N"
        )
        return found
    return {**found, "output_len": output_lengths(lengths.completion_tokens, longest=longest)}


def _environment(run: RunConfig | None, lengths: Lengths, notes: list[str]) -> Document:
    """Key `environment` of the workload, where sessions are known to wait for one."""
    section = None if run is None else run.environment
    if lengths.environment_wait_s is None:
        if section is not None:
            notes.append(
                "environment: for how long sessions wait for it is not known, so they are planned as if they did not; "
                "give --data a recording of a run with it"
            )
        return {}
    limit: Document = {} if section is None else {"max_waiting": section.max_waiting}
    return {"environment": {"wait_s": lengths.environment_wait_s, **limit}}


def _scale(run: RunConfig, model: Path | None) -> Document:
    """Size of the scorers' model over the policy's, where it is another one on this machine."""
    teacher = run.algorithm.reference_path
    if model is None or not isinstance(teacher, Path):
        return {}
    return {"scale": read_numbers(teacher)["params"] / read_numbers(model)["params"]}


def _train_tasks(run: RunConfig | None, model: Path | None) -> list[Document]:
    """What is computed on each sample, by the run's algorithm; training the policy alone without a run."""
    tasks: list[Document] = [{"name": "actor_train", "kind": "train"}]
    if run is None:
        return tasks
    if run.algorithm.has_trainer_reference:
        tasks.append({"name": "reference", "kind": "infer"})
    if run.algorithm.has_scorer:
        tasks.append({"name": "reference", "kind": "infer", "is_service": True, **_scale(run, model)})
    # A critic that is started by hand is beside the plan.
    if run.algorithm.has_trainer_critic or run.starts_critic:
        place: Document = {"is_service": True} if run.starts_critic else {}
        tasks += [
            {"name": "critic", "kind": "infer", "shares_weights": True, **place},
            {"name": "critic_train", "kind": "train", **place},
        ]
    return tasks


def _run_constants(run: RunConfig | None, notes: list[str]) -> Document:
    """Keys of `cost_model` that the run decides: memory and traffic are then those of Penstock's own trainer."""
    if run is None:
        return {}
    if run.lora is not None:
        notes.append("lora: planned as if all weights were trained; the cost model knows no adapters")
    return {"max_num_seqs": run.generator.max_concurrent_samples, "train_pack_tokens": run.trainer.tokens_per_pack}


def _constraints(run: RunConfig | None) -> Document:
    """What the run's engine can do beyond the defaults; recorded routes come from one stage only."""
    if run is None or not ENGINES[run.generator.engine].has_pipeline_stages or run.algorithm.routing_replay:
        return {}
    return {"gen_pp": MAX_STAGES}


def _on_cpus(run: RunConfig, probes: Sequence[Probe]) -> list[str]:
    """A run that does not say that it trains on CPUs, where machines have nothing else: they are checked for GPUs."""
    types = {probe.accelerators.type for probe in probes if probe.accelerators is not None}
    if types != {"cpu"} or run.trainer.device == "cpu":
        return []
    return [f"trainer.device: {run.trainer.device}, and all probed devices are CPUs; set it to cpu in the run"]


def _differences(run: RunConfig, probes: Sequence[Probe]) -> list[str]:
    """Where the machines of the run, `scheduler.nodes`, are not those of the inventory; one line each."""
    known = {probe.name: probe for probe in probes}
    nodes = read_nodes(run.scheduler.nodes).items()
    return [line for path, node in nodes for line in _node_differences(path, node, known)]


def _node_differences(path: Path, node: NodeConfig, known: Mapping[str, Probe]) -> list[str]:
    probe = known.get(node.node_id)
    if probe is None:
        return [
            f"{path}: node_id: {node.node_id!r} is not in the inventory ({', '.join(known)}); run penstock probe "
            f"--name {node.node_id} on it, or leave it out of scheduler.nodes"
        ]
    own = probe.accelerators
    assert own is not None, "hosts are no machines of scheduler.nodes"
    return device_differences(path, node, gpu=own.kind, gpus=own.count, source="the probe")
