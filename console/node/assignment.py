"""Derives the generators of one machine from a plan, and the changes when the plan is revised. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from console.node.config import NodeConfig
from penstock.v1 import generator_pb2
from penstock.v1 import scheduler_pb2 as pb
from services.generator.config import GeneratorConfig, InstanceConfig
from services.scheduler.replanning.migration import is_like

MOST_SAMPLES = 8192
RELAY_PATIENCE_S = 5.0
"""Generators of a site hear of a version at once, and the relay's begin with it once the one before is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A generator process of this machine."""

    gpus: tuple[int, ...]
    """Indices on the machine."""
    pipeline_parallel: int = 1
    """Stages of each replica."""
    num_replicas: int = 1
    """Emulated generators that share the process."""
    num_samples: int = 0
    """Samples that each replica decodes at once by the plan; 0 if the plan does not say."""

    @property
    def name(self) -> str:
        """Its name on the machine: no two processes share a GPU."""
        return f"gen-{self.gpus[0]}"

    @property
    def tensor_parallel(self) -> int:
        """GPUs of each stage of a replica."""
        return len(self.gpus) // self.num_replicas // self.pipeline_parallel

    def is_like(self, other: Placement) -> bool:
        """Whether a process of one placement can continue as the other."""
        is_same = (self.gpus, self.pipeline_parallel, self.num_replicas) == (
            other.gpus,
            other.pipeline_parallel,
            other.num_replicas,
        )
        return is_same and is_like(self.num_samples, other.num_samples)


@dataclass(frozen=True, slots=True)
class Change:
    """The changes that a revision requires."""

    stops: tuple[str, ...]
    """Names of processes to end; they give back their leases."""
    starts: tuple[Placement, ...]
    """Processes to start, after those have ended."""


def placements(plan: pb.Plan, config: NodeConfig) -> dict[str, Placement]:
    """The generators that the plan places on this machine, by name."""
    found = (one for each in plan.assignments for one in _placed(each, config))
    return {one.name: one for one in found}


def misfits(plan: pb.Plan, config: NodeConfig) -> list[str]:
    """How the plan exceeds this machine's GPUs, in words: the problem then describes another machine."""
    return [_misfit(each, config) for each in plan.assignments if _is_for(each, config) and not _fits(each, config)]


def _misfit(each: pb.Assignment, config: NodeConfig) -> str:
    if _lacks_stages(each, config):
        return (
            f"generators of {each.pipeline_parallel} pipeline stages; engine {config.generator.engine.engine} has none"
        )
    return (
        f"{each.num_replicas} generators of {_degree(each)} GPUs, on GPUs "
        f"{', '.join(map(str, each.accelerator_indices)) or 'of its choice'}; there are {config.gpus}"
        f"{f' from {config.first_gpu} on' if config.first_gpu else ''}"
    )


def _lacks_stages(each: pb.Assignment, config: NodeConfig) -> bool:
    return each.pipeline_parallel > 1 and not config.generator.engine.has_pipeline_stages


def _degree(each: pb.Assignment) -> int:
    """GPUs of a replica."""
    return max(1, each.tensor_parallel) * max(1, each.pipeline_parallel)


def _is_for(each: pb.Assignment, config: NodeConfig) -> bool:
    return each.node_id == config.node_id and each.role == pb.ROLE_GENERATOR


def _fits(each: pb.Assignment, config: NodeConfig) -> bool:
    gpus = _gpus(each, config)
    is_enough = len(gpus) >= _degree(each) * max(1, each.num_replicas)
    is_enough = is_enough and config.first_gpu <= min(gpus) and max(gpus) < config.gpus
    return is_enough and not _lacks_stages(each, config)


def _gpus(each: pb.Assignment, config: NodeConfig) -> tuple[int, ...]:
    return tuple(each.accelerator_indices) or tuple(range(config.first_gpu, config.gpus))


def _placed(each: pb.Assignment, config: NodeConfig) -> Iterator[Placement]:
    if not _is_for(each, config) or not _fits(each, config):
        return
    gpus = _gpus(each, config)
    count, degree = max(1, each.num_replicas), _degree(each)
    settings = {"pipeline_parallel": max(1, each.pipeline_parallel), "num_samples": each.num_concurrent_samples}
    if config.generator.engine.is_emulated:
        used = gpus[: degree * count]
        yield Placement(gpus=used, num_replicas=count, **settings)
        return
    for index in range(count):
        own = gpus[index * degree : (index + 1) * degree]
        yield Placement(gpus=own, **settings)


def change(running: Mapping[str, Placement], wanted: Mapping[str, Placement]) -> Change:
    """The processes to stop and to start to turn `running` into `wanted`."""
    goes_on = {name for name, one in wanted.items() if name in running and running[name].is_like(one)}
    return Change(
        stops=tuple(name for name in running if name not in goes_on),
        starts=tuple(one for name, one in wanted.items() if name not in goes_on),
    )


def relay_of(plan: pb.Plan, config: NodeConfig) -> str | None:
    """The machine that brings weights to this one's site; None if the plan names none."""
    return next((each.node_id for each in plan.weight_relays if each.site == config.site), None)


def relay_patience(config: NodeConfig, relay: str | None) -> generator_pb2.SetRelayPatienceRequest:
    """How long this machine's generators leave a new version to the machine that brings it to their site."""
    found = generator_pb2.SetRelayPatienceRequest(run_id=config.generator.run_id)
    found.patience.FromMilliseconds(round(1000 * _patience_s(config, relay)))
    return found


def _patience_s(config: NodeConfig, relay: str | None) -> float:
    base = config.generator
    return RELAY_PATIENCE_S if base.site and relay not in (None, config.node_id) else base.relay_patience_s


def generator_config(
    config: NodeConfig, placement: Placement, *, port: int, relay: str | None = None
) -> GeneratorConfig:
    """The configuration of a process.

    Args:
        config: The machine's.
        placement: The process.
        port: Its own, and the following ones are free for it.
        relay: The machine of its site whose generators fetch a version first.
    """
    base = config.generator
    host = base.listen.rpartition(":")[0]
    num_samples = min(placement.num_samples or base.engine.max_concurrent_samples, MOST_SAMPLES)
    engine = {
        "tensor_parallel": placement.tensor_parallel,
        "pipeline_parallel": placement.pipeline_parallel,
        "max_concurrent_samples": num_samples,
    }
    update: dict[str, object] = {
        "insecure": base.insecure or config.insecure,
        "listen": f"{host}:{port}",
        "generator_id": f"{config.node_id}-gen-{placement.gpus[0]}",
        "engine": base.engine.model_copy(update=engine),
        "cache_dir": base.cache_dir / placement.name,
        "relay_patience_s": _patience_s(config, relay),
    }
    if base.engine.is_emulated:
        update["instances"] = (InstanceConfig(count=placement.num_replicas),)
    elif base.site:
        # At a site other than the trainer's, one generator fetches each version and relays it to the others.
        update |= {"relay_listen": f"{host}:{port + 1}", "relay_url": f"{config.address}:{port + 1}"}
    return base.model_copy(update=update)
