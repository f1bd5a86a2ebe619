"""Joins entries of equal machines into one, as searches count machines of an entry and not entries.

Problems built from a list of machines may have an entry for each. Plans name machines, so that those for the joined
problem are plans for the stated one.
"""

from __future__ import annotations

from services.scheduler.problem.problem import NodeClass, Problem

_APART = {"name", "count", "machines"}
"""What entries of equal machines differ in."""


def with_joined_entries(problem: Problem) -> Problem:
    """The problem with one entry for all equal machines; itself if there is nothing to join."""
    alike: dict[str, list[NodeClass]] = {}
    for node in problem.nodes:
        alike.setdefault(node.model_dump_json(exclude=_APART), []).append(node)
    if len(alike) == len(problem.nodes):
        return problem
    return problem.model_copy(update={"nodes": tuple(map(_joined, alike.values()))})


def _joined(nodes: list[NodeClass]) -> NodeClass:
    if len(nodes) == 1:
        return nodes[0]
    names = tuple(node.machine(index) for node in nodes for index in range(node.count))
    return nodes[0].model_copy(update={"count": len(names), "machines": names})
