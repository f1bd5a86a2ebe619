"""Prints a plan as text: roles, throughput, bottleneck, and which GPUs to add or give up next."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

from services.scheduler.cost_model.calibrated import CALIBRATED
from services.scheduler.cost_model.reference import RM1, Limit
from services.scheduler.planning.market import Alternative, Purchase
from services.scheduler.planning.plan_report import FeasiblePlan, bottleneck
from services.scheduler.problem.cost_constants import CostConstants
from services.scheduler.problem.plan_document import PlanDocument, Replicas
from services.scheduler.service_placement.service_places import weight_routes

_LIMITS = {
    Limit.GENERATION: "generation limits: trainers wait for samples",
    Limit.TRAINING: "training limits: generators wait for the trainer",
    Limit.SCORING: "scorers limit: generators and trainers wait for log-probs",
    Limit.REWARD: "reward workers limit: generators and trainers wait for scores",
    Limit.CRITIC: "the critic limits: the trainer waits for values",
    Limit.TAIL: "the longest samples limit: they must finish inside their staleness window",
}
_COST_MODELS = {
    RM1: "reference cost model RM-1, which is optimistic by 1.1 to 2.2 times",
    CALIBRATED: "calibrated cost model, 0.76 to 1.24 times what nine published runs measured",
}


def print_plan(report: FeasiblePlan, *, is_explained: bool) -> None:
    """Print the plan."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=report.model.problem.id, box=box.SIMPLE)
    for heading in ("machines", "GPU", "does", "sequences", "samples/s", "fresh"):
        table.add_column(heading, justify="left" if heading in ("machines", "GPU", "does") else "right")
    for (_, *cells), machines in _rows(report).items():
        shown = machines[0] if len(machines) == 1 else f"{machines[0]} and {len(machines) - 1} like it"
        table.add_row(shown, node.gpu if (node := report.model.nodes.get(machines[0])) else "", *cells)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    for line in (*_lines(report), *(_explained(report) if is_explained else _next_steps(report))):
        print(line)


def _rows(report: FeasiblePlan) -> dict[tuple[str, ...], list[str]]:
    """Machines with the same role, by role."""
    rows: dict[tuple[str, ...], list[str]] = {}
    nodes = report.model.nodes
    for share in report.plan.train:
        node = nodes[share.node]
        does = f"train, {share.gpus} of {node.gpus} GPUs"
        rows.setdefault((node.name, does, "", "", ""), []).append(share.node)
    for scorers in report.plan.score:
        does = f"score, {scorers.gpus} of {nodes[scorers.node].gpus} GPUs"
        rows.setdefault((nodes[scorers.node].name, does, "", "", ""), []).append(scorers.node)
    if (critic := report.plan.critic) is not None:
        where = "the trainer's " if critic.is_beside_trainer else ""
        does = f"critic, {where}{critic.gpus} of {nodes[critic.node].gpus} GPUs"
        rows.setdefault((nodes[critic.node].name, does, "", "", ""), []).append(critic.node)
    for workers in report.plan.reward_gpus:
        does = f"reward workers, {workers.gpus} of {nodes[workers.node].gpus} GPUs"
        rows.setdefault((nodes[workers.node].name, does, "", "", ""), []).append(workers.node)
    for name in report.plan.reward:
        kind = nodes[name].name if name in nodes else report.model.hosts[name].name
        rows.setdefault((kind, "reward worker", "", "", ""), []).append(name)
    for each in report.score.generation:
        batch = each.state.batch if each.state is not None else 0
        cells = (_does(each.replicas), f"{batch}", f"{each.samples_per_second:.3g}", f"{each.duty:.0%}")
        rows.setdefault((nodes[each.replicas.node].name, *cells), []).append(each.replicas.node)
    return rows


def _does(replicas: Replicas) -> str:
    return f"generate, {replicas.count} x {_layout(replicas)}"


def _layout(replicas: Replicas) -> str:
    stages = f" x {replicas.pp} stages" if replicas.pp > 1 else ""
    return f"tensor parallel {replicas.tp}{stages}"


def _lines(report: FeasiblePlan) -> list[str]:
    solution, score = report.solution, report.score
    bound = solution.upper_bound_samples_per_second
    if solution.is_optimal:
        quality = "optimal: no other plan of this kind is faster"
    else:
        quality = f"at most {bound:.4g} samples/s is possible, gap {report.gap:.1%}" if bound else "no bound"
    return [
        f"{score.samples_per_second:.4g} samples/s, {report.tokens_per_second:,.0f} tokens/s, "
        f"a step in {report.step_s:.4g} s (training {score.training.step_s:.4g} s)",
        _simulated(report),
        *_mesh(report.plan),
        _center(report.plan),
        f"${report.usd_per_hour:.2f} an hour, ${report.usd_per_million_tokens:.3g} per million tokens",
        f"{_LIMITS[score.limit]}; idle: generation {report.generation_idle:.0%}, training {report.training_idle:.0%}",
        f"bottleneck: {bottleneck(score)}",
        f"{quality} ({solution.solver}, {solution.num_evaluated} plans scored, {report.solve_s:.2f} s; "
        f"{_COST_MODELS[report.model.name]})",
    ]


def _mesh(plan: PlanDocument) -> list[str]:
    """How the pool's GPUs stand together, where the plan says so."""
    if (mesh := plan.mesh) is None:
        return []
    sizes = mesh.sizes(plan.num_processes)
    if mesh.pipeline > 1:
        layers = ", ".join(map(str, mesh.layers_per_stage or ()))
        each = f"{mesh.pipeline} stages of {layers or 'as many'} layers, on {sizes[0] // mesh.pipeline} GPUs each"
        return [f"training: {each}" + (f", in {len(sizes)} copies" if len(sizes) > 1 else "")]
    if mesh.tensor > 1:
        return [f"training: layers split over {mesh.tensor} GPUs, {len(sizes)} x {sizes[0] // mesh.tensor} shards"]
    if mesh.expert > 1:
        return [f"training: experts divided over {mesh.expert} GPUs, {len(sizes)} x {sizes[0]} shards"]
    if mesh.offload:
        held = "weights and optimiser in the machines' memory"
        return [f"training: {held}, {len(sizes)} x {sizes[0]} shards"]
    counts = Counter(sizes)
    islands = " and ".join(f"{count} of {size}" for size, count in counts.items())
    return [f"training: islands of GPUs that each hold a copy, {islands}"]


def _center(plan: PlanDocument) -> str:
    """Where the run's own services stand."""
    found, count = plan.center, plan.broker.count if plan.broker is not None else 1
    brokers = "broker" if count == 1 else f"{count} brokers"
    if found["broker"] == found["scheduler"]:
        return f"Redis, {brokers} and scheduler: on {found['broker']}"
    return f"Redis and {brokers}: on {found['broker']}; scheduler: on {found['scheduler']}"


def _weights(report: FeasiblePlan) -> Iterator[str]:
    """Which link carries new weights where."""
    for route in weight_routes(report.model, report.plan):
        is_far = route.to_site != route.from_site
        way = f"{route.from_site} to {route.to_site}" if is_far else f"inside {route.to_site}"
        seconds = f"{route.seconds:10.3f} s" if route.seconds is not None else f"{'no link':>12}"
        relay = f" by {route.relay}" if route.relay is not None else ""
        copies = f"{route.copies} {'copy' if route.copies == 1 else 'copies'}"
        yield f"  {seconds}  {way}{relay}: {copies} of {route.bytes_per_version / 1e9:.3g} GB"


def _simulated(report: FeasiblePlan) -> str:
    rate = report.simulated_samples_per_second
    if report.model.problem.workload.environment is not None:
        return "not simulated: sessions wait for their environment, which no simulation does"
    if rate is None:
        return (
            "not simulated: the time was too short (--budget-s), or the run gets stuck (penstock simulate says where)"
        )
    share = rate / report.score.samples_per_second
    return f"what a run reaches by simulation: {rate:.4g} samples/s, {share:.0%} of that (long tails, staleness, moves)"


def _waits(report: FeasiblePlan) -> Iterator[str]:
    """What an environment does to generation."""
    if (environment := report.model.problem.workload.environment) is None:
        return
    waiting = report.score.samples_per_second * environment.wait_s
    yield f"  {environment.wait_s:10.3f} s  a session waits for its environment, {waiting:.4g} at a time"
    for each in report.score.generation:
        if each.state is not None and each.state.decoding < each.state.batch:
            yield (
                f"{'':14}{each.replicas.node}: {each.state.decoding:.0f} of {each.state.batch} slots decode, as at "
                f"most {environment.max_waiting} sessions beside them may wait (environment.max_waiting)"
            )


def _next_steps(report: FeasiblePlan) -> Iterator[str]:
    if report.next_purchases:
        yield f"best next purchase: {_purchase(report.next_purchases[0])}"
    if cheaper := _cheaper(report):
        best = min(cheaper, key=report.usd_per_million_of)
        if report.usd_per_million_of(best) < report.usd_per_million_tokens * 0.999:
            yield f"cheapest per token: {_alternative(report, best)}"


def _cheaper(report: FeasiblePlan) -> list[Alternative]:
    return [each for each in report.alternatives if each.usd_per_hour < report.usd_per_hour]


def _purchase(each: Purchase) -> str:
    cost = f", ${each.usd_per_hour:.2f} an hour" if each.usd_per_hour > 0 else ""
    return f"{each.num_gpus} more {each.gpu} in {each.region}: {each.gain:+.1%}{cost}"


def _alternative(report: FeasiblePlan, each: Alternative) -> str:
    machines = ", ".join(f"{count} {name}" for name, count in each.machines.items() if count)
    change = each.samples_per_second / report.score.samples_per_second - 1
    return (
        f"{machines}: {each.samples_per_second:.4g} samples/s ({change:+.1%}), "
        f"${each.usd_per_hour:.2f} an hour, ${report.usd_per_million_of(each):.3g} per million tokens"
    )


def _offload_rates(constants: CostConstants) -> Iterator[str]:
    """By which rates weights and optimiser move, and whether anybody measured them."""
    for field, what in (("host_link_GBps", "between a GPU and its machine's memory"), ("host_memory_GBps", "in it")):
        is_stated = field in constants.model_fields_set
        origin = "stated" if is_stated else f"assumed; penstock probe measures it: cost_model.{field}"
        yield f"  {getattr(constants, field):10.1f} GB/s {what} ({origin})"


def _explained(report: FeasiblePlan) -> Iterator[str]:
    """How the time is spent, and every offer."""
    training = report.score.training
    yield ""
    yield f"training, {sum(share.gpus for share in report.plan.train)} GPUs, a step:"
    for name, seconds in (
        ("computation", training.compute_s),
        ("all-reduce that it does not hide", training.exposed_allreduce_s),
        ("fixed", training.overhead_s),
    ):
        yield f"  {seconds:10.3f} s  {name} ({seconds / training.step_s:.0%})"
    if report.plan.mesh is not None and report.plan.mesh.offload:
        yield from _offload_rates(report.model.problem.cost_model)
    yield "generation, a decode step of one replica:"
    generation = {(each.replicas.node, _does(each.replicas)): each for each in report.score.generation}
    for (name, does, *_), machines in _rows(report).items():
        each = generation.get((machines[0], does))
        if each is not None and each.state is not None:
            gpus, state = each.replicas.layout.gpus, each.state
            yield (
                f"  {state.step_s * 1000:10.2f} ms {name}, {_layout(each.replicas)}: {state.batch} sequences, "
                f"{report.model.demand.weight_bytes / gpus / 1e9:.1f} GB of weights a GPU"
            )
    yield from _waits(report)
    yield "new weights of a step, whole (deltas are smaller):"
    yield from _weights(report)
    yield "one more machine would bring:" if report.next_purchases else "no offer makes it faster"
    for purchase in report.next_purchases:
        yield f"  {_purchase(purchase)}"
    if cheaper := _cheaper(report):
        yield "fewer machines would bring:"
    for alternative in cheaper:
        yield f"  {_alternative(report, alternative)}"
