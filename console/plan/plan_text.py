"""A plan as people read it: who does what, what that achieves, what limits it, and what to buy or give up next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from services.scheduler.cost_model.calibrated import CALIBRATED
from services.scheduler.cost_model.reference import RM1, CostModel

Document = dict[str, Any]
_LIMITS = {
    "generation": "generation limits: trainers wait for samples",
    "training": "training limits: generators wait for the trainer",
    "tail": "the longest samples limit: they must finish inside their staleness window",
}
_COST_MODELS = {
    RM1: "reference cost model RM-1, which is optimistic by 1.1 to 2.2 times",
    CALIBRATED: "calibrated cost model, 0.76 to 1.24 times what nine published runs measured",
}


def print_plan(model: CostModel, document: Document, *, is_explained: bool) -> None:
    """Print the plan of a document that has one."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=document["problem"], box=box.SIMPLE)
    for heading in ("machines", "GPU", "does", "sequences", "samples/s", "fresh"):
        table.add_column(heading, justify="left" if heading in ("machines", "GPU", "does") else "right")
    for (_, *cells), machines in _rows(model, document).items():
        shown = machines[0] if len(machines) == 1 else f"{machines[0]} and {len(machines) - 1} like it"
        table.add_row(shown, model.nodes[machines[0]].gpu, *cells)
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    for line in (*_lines(document), *(_explained(model, document) if is_explained else _next_steps(document))):
        print(line)


def _rows(model: CostModel, document: Document) -> dict[tuple[str, ...], list[str]]:
    """Machines that do the same, by what they do."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for share in document["rm1_plan"]["train"]:
        name = model.nodes[share["node"]].name
        rows.setdefault(
            (name, f"train, {share['gpus']} of {model.nodes[share['node']].gpus} GPUs", "", "", ""), []
        ).append(share["node"])
    for each in document["generation"]:
        does = f"generate, {each['count']} x tensor parallel {each['tp']}"
        cells = (does, f"{each['batch']}", f"{each['samples_per_second']:.3g}", f"{each['duty']:.0%}")
        rows.setdefault((model.nodes[each["node"]].name, *cells), []).append(each["node"])
    return rows


def _lines(document: Document) -> list[str]:
    bound = document["upper_bound_samples_per_second"]
    if document["is_optimal"]:
        quality = "optimal: no other plan of this kind is faster"
    else:
        quality = f"at most {bound:.4g} samples/s is possible, gap {document['gap']:.1%}" if bound else "no bound"
    return [
        f"{document['samples_per_second']:.4g} samples/s, {document['tokens_per_second']:,.0f} tokens/s, "
        f"a step in {document['step_s']:.4g} s (training {document['training']['step_s']:.4g} s)",
        _simulated(document),
        f"${document['usd_per_hour']:.2f} an hour, ${document['usd_per_million_tokens']:.3g} per million tokens",
        f"{_LIMITS[document['limit']]}; idle: generation {document['generation_idle']:.0%}, "
        f"training {document['training_idle']:.0%}",
        f"bottleneck: {document['bottleneck']}",
        f"{quality} ({document['solver']}, {document['num_evaluated']} plans scored, {document['solve_s']:.2f} s; "
        f"{_COST_MODELS[document['cost_model']]})",
    ]


def _simulated(document: Document) -> str:
    rate = document["simulated_samples_per_second"]
    if rate is None:
        return (
            "not simulated: the time was too short (--budget-s), or the run gets stuck (penstock simulate says where)"
        )
    share = rate / document["samples_per_second"]
    return f"what a run reaches by simulation: {rate:.4g} samples/s, {share:.0%} of that (long tails, staleness, moves)"


def _next_steps(document: Document) -> Iterator[str]:
    if document["next_purchases"]:
        yield f"best next purchase: {_purchase(document['next_purchases'][0])}"
    if cheaper := _cheaper(document):
        best = min(cheaper, key=lambda each: each["usd_per_million_tokens"])
        if best["usd_per_million_tokens"] < document["usd_per_million_tokens"] * 0.999:
            yield f"cheapest per token: {_alternative(document, best)}"


def _cheaper(document: Document) -> list[Document]:
    return [each for each in document["alternatives"] if each["usd_per_hour"] < document["usd_per_hour"]]


def _purchase(each: Document) -> str:
    cost = f", ${each['usd_per_hour']:.2f} an hour" if each["usd_per_hour"] > 0 else ""
    return f"{each['num_gpus']} more {each['gpu']} in {each['region']}: {each['gain']:+.1%}{cost}"


def _alternative(document: Document, each: Document) -> str:
    machines = ", ".join(f"{count} {name}" for name, count in each["machines"].items() if count)
    change = each["samples_per_second"] / document["samples_per_second"] - 1
    return (
        f"{machines}: {each['samples_per_second']:.4g} samples/s ({change:+.1%}), "
        f"${each['usd_per_hour']:.2f} an hour, ${each['usd_per_million_tokens']:.3g} per million tokens"
    )


def _explained(model: CostModel, document: Document) -> Iterator[str]:
    """Where the time goes, and every offer."""
    training = document["training"]
    yield ""
    yield f"training, {sum(share['gpus'] for share in document['rm1_plan']['train'])} GPUs, a step:"
    for name, key in (
        ("computation", "compute_s"),
        ("all-reduce that it does not hide", "exposed_allreduce_s"),
        ("fixed", "overhead_s"),
    ):
        yield f"  {training[key]:10.3f} s  {name} ({training[key] / training['step_s']:.0%})"
    yield "generation, a decode step of one replica:"
    for (name, does, *_), machines in _rows(model, document).items():
        each = next((item for item in document["generation"] if item["node"] == machines[0]), None)
        if each is not None and does.startswith("generate") and each["decode_step_s"]:
            model_bytes = model.demand.weight_bytes / each["tp"]
            yield (
                f"  {each['decode_step_s'] * 1000:10.2f} ms {name}, tensor parallel {each['tp']}: "
                f"{each['batch']} sequences, {model_bytes / 1e9:.1f} GB of weights a GPU"
            )
    yield "one more machine would bring:" if document["next_purchases"] else "no offer makes it faster"
    for purchase in document["next_purchases"]:
        yield f"  {_purchase(purchase)}"
    if cheaper := _cheaper(document):
        yield "fewer machines would bring:"
    for each in cheaper:
        yield f"  {_alternative(document, each)}"
