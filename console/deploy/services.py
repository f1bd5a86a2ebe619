"""Places the services of a deployment on its machines."""

from __future__ import annotations

from dataclasses import replace

from console.config.derive import export_environment
from console.config.sections import LogSection, TracingSection
from console.deploy.configurations import Configurations
from console.deploy.description import (
    PORTS,
    REDIS_MEMORY_GIB,
    Deployment,
    Host,
    Service,
    broker_name,
    broker_port,
    host_reward,
    memory_gib,
)
from console.deploy.environments import NAME as ENVIRONMENT
from console.deploy.environments import stated_environment
from console.deploy.nodes import Machine
from console.deploy.trainers import TrainingMachine
from console.launch.service_group import log_options
from penstock.config import ConfigError, validate
from penstock.security.plain_text import INSECURE_VARIABLE
from services.scheduler.problem.plan_document import host_classes, node_classes


def describe(made: Configurations, *, head_address: str | None) -> Deployment:
    """The deployment of these configurations. Raises ConfigError."""
    kinds = node_classes(made.model.problem) | host_classes(made.model.problem)
    hosts = [
        Host(
            name=name,
            address=made.host(name),
            kind=kinds[name],
            services=services,
            role=made.role(name),
            more_roles=made.more_roles(name),
            is_center=name in (made.head.name, *made.plan.center.values()),
        )
        for name in made.names()
        # Tried on one host, the head's trainer starts all processes.
        if (services := tuple(_services(made, name)))
    ]
    found = Deployment(
        run_id=made.config["run"]["id"],
        center=made.center,
        layout=made.layout,
        hosts=hosts,
        has_certificates=made.has_certificates,
        tracing=export_environment(
            validate(TracingSection, made.config.get("tracing", {}), source="tracing"), made.config["run"]["id"]
        ),
        configurations=made.files(),
        weight_bytes=_weight_bytes(made),
        public={},
        has_storage=made.config["run"].get("checkpoint_storage") is not None,
        serves_environment=made.serves_environment,
        critic_on=None if made.plan.critic is None or made.moves_critic else made.plan.critic.node,
        moving_by=str(made.config["run"]["checkpoint_storage"]) if made.moves_trainer else None,
    )
    return replace(found, public=_public(found, head_address))


def _public(deployment: Deployment, stated: str | None) -> dict[str, str]:
    """Addresses of the machines that other sites reach, by machine."""
    names = [host.name for host in deployment.center_hosts]
    addresses = stated.split(",") if stated else []
    if addresses and len(addresses) != len(names):
        raise ConfigError(
            f"--head: {stated} names {len(addresses)} machines, and other sites reach {' and '.join(names)}; name "
            f"{len(names)} in this order, with commas between them"
        )
    return dict(zip(names, addresses, strict=False))


def _services(made: Configurations, name: str) -> list[Service]:
    trains = next((each for each in made.trainers if each.name == name), None)
    generates = next((each for each in made.machines if each.name == name), None)
    is_head = name == made.head.name
    found: list[Service] = []
    if made.layout.is_container:
        found += _center(made, name)
    elif name in made.hosts:
        found.append(_host(made, name))
    has_trainer = trains is not None and (trains.torchrun or (is_head and made.layout.is_container))
    if trains is not None and has_trainer and not made.moves_trainer:
        found.append(_trainer(made, trains, is_head=is_head))
    if is_head:
        found.append(_run(made))
    if generates is not None:
        found.append(_node(made, generates))
    return found


def _center(made: Configurations, machine: str) -> list[Service]:
    """What a machine has of Redis, broker, scheduler and the head's reward worker, each in a container."""
    config = made.layout.config
    redis = ("redis-server", "--port", str(PORTS["redis"]), "--bind", "127.0.0.1", "--dir", "/data")
    durable = ("--appendonly", "yes", "--appendfsync", "everysec")
    bounded = ("--maxmemory", f"{REDIS_MEMORY_GIB}gb", "--maxmemory-policy", "noeviction")
    found = []
    if made.place("redis") == machine:
        found.append(
            Service(
                name="redis",
                kind="redis",
                image="redis:7",
                arguments=(*redis, *durable, *bounded),
                memory_gib=memory_gib("redis"),
            )
        )
    starts: list[tuple[str, int, tuple[str, ...]]] = [
        *((broker_name(index), broker_port(index), ("redis",)) for index in range(made.num_brokers)),
        ("scheduler", PORTS["scheduler"], ()),
    ]
    if made.head_rewards:
        starts.append(("reward", PORTS["reward"], ("broker",)))
    if made.serves_environment and made.place(ENVIRONMENT) == machine:
        found.append(_environment(made))
    for name, port, after in starts:
        kind = name.partition("-")[0]
        if made.place(kind) != machine:
            continue
        found.append(
            Service(
                name=name,
                kind=kind,
                image=f"penstock-{kind}",
                arguments=("serve", kind, "--config", str(config / f"{name}.yaml"), *_logs(made)),
                port=port,
                memory_gib=memory_gib(kind),
                after=after,
            )
        )
    if (own_port := made.host_rewards.get(machine)) is not None:
        found.append(_host_reward(made, machine, own_port))
    return found


def _host_reward(made: Configurations, machine: str, port: int) -> Service:
    """The reward worker of a machine without GPUs."""
    name = host_reward(machine)
    return Service(
        name=name,
        kind="reward",
        image="penstock-reward",
        arguments=("serve", "reward", "--config", str(made.layout.config / f"{name}.yaml"), *_logs(made)),
        port=port,
        memory_gib=memory_gib("reward"),
    )


def _environment(made: Configurations) -> Service:
    """The run's environment; its module lies in the folder of the data, where its image works."""
    port = PORTS[ENVIRONMENT]
    return Service(
        name=ENVIRONMENT,
        kind=ENVIRONMENT,
        image="penstock-reward",
        arguments=(
            "env",
            "serve",
            str(stated_environment(made.config)["target"]),
            "--listen",
            f"{made.listen_host}:{port}",
            *_logs(made),
        ),
        port=port,
        memory_gib=memory_gib(ENVIRONMENT),
        variables={INSECURE_VARIABLE: "true"} if made.is_insecure else {},
    )


def _logs(made: Configurations) -> tuple[str, ...]:
    """Options that say how a service writes its log, where the run's file does; `penstock run` and `node` read that."""
    section = validate(LogSection, made.config.get("log", {}), source="log")
    return () if section == LogSection() else log_options(section)


def _host(made: Configurations, machine: str) -> Service:
    """What starts the services of a machine without GPUs where there are no containers."""
    kinds = ("redis", *["broker"] * made.num_brokers, "scheduler")
    services = [name for name in kinds if made.place(name) == machine]
    services += ["reward"] * (machine in made.host_rewards)
    return Service(
        name=f"node-{machine}",
        kind="node",
        image="penstock-console",
        arguments=("node", str(made.layout.config / f"node-{machine}.yaml")),
        memory_gib=sum(map(memory_gib, services)),
    )


def _trainer(made: Configurations, trainer: TrainingMachine, *, is_head: bool) -> Service:
    """The trainer on the head; on other machines of the pool, the processes that it sends packs to."""
    return Service(
        name="trainer" if is_head else f"trainer-{trainer.name}",
        kind="trainer",
        image=_image(made, "trainer"),
        arguments=("serve", "trainer", "--config", str(made.layout.config / "trainer.yaml"), *_logs(made)),
        torchrun=trainer.torchrun,
        port=PORTS["trainer"] if is_head else None,
        gpus=0 if made.is_emulated else trainer.gpus,
        memory_gib=memory_gib("trainer", weight_bytes=_weight_bytes(made), gpus=trainer.gpus),
        after=("broker", "scheduler") if is_head and made.layout.is_container else (),
    )


def _run(made: Configurations) -> Service:
    """What follows the run, and where there are no containers starts the head's services too."""
    layout = made.layout
    is_alone = not layout.is_container and not made.head.torchrun and not made.moves_trainer
    local = ["broker", "scheduler", *(["reward"] if made.head_rewards else [])]
    local += [ENVIRONMENT] if made.serves_environment else []
    if not made.moves_trainer:
        local.append("trainer")
    after = tuple(local) if layout.is_container else ()
    limit_gib = memory_gib("run")
    if not layout.is_container:
        kinds = ("redis", *(each for each in local if each != "trainer"))
        limit_gib += sum(memory_gib(kind) for kind in kinds if made.place(kind) == made.head.name)
    if is_alone:
        limit_gib += memory_gib("trainer", weight_bytes=_weight_bytes(made), gpus=made.head.gpus)
    return Service(
        name="run",
        kind="run",
        image="penstock-console",
        arguments=("run", str(layout.config / "run.yaml"), "--resume-or-start"),
        gpus=made.head.gpus if is_alone and not made.is_emulated else 0,
        memory_gib=limit_gib,
        after=after,
    )


def _node(made: Configurations, machine: Machine) -> Service:
    kinds = ("node", "trainer") if made.moves_trainer else ("node",)
    return Service(
        name=f"node-{machine.name}",
        kind="node",
        image=_image(made, "generator"),
        arguments=("node", str(made.layout.config / f"node-{machine.name}.yaml")),
        gpus=0 if made.is_emulated else machine.kind.gpus - made.first_gpu(machine.name),
        memory_gib=sum(memory_gib(kind, weight_bytes=_weight_bytes(made), gpus=machine.kind.gpus) for kind in kinds),
        may_train=made.moves_trainer,
    )


def _weight_bytes(made: Configurations) -> float:
    # Emulated GPUs decode a model of any size without its weights; the one that trains beside them is small.
    return 0.0 if made.is_emulated else made.model.demand.weight_bytes


def _image(made: Configurations, kind: str) -> str:
    return f"penstock-{kind}" if made.is_emulated else f"penstock-{kind}-gpu"
