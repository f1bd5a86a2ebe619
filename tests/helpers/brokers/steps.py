"""Whole steps of a run played by hand: prompts, tokens, scores, an acknowledgement."""

from __future__ import annotations

from tests.helpers.brokers.broker import RUN, Generator, RunningBroker, Trainer, Worker, prompt


async def train_step(
    broker: RunningBroker,
    *names: str,
    version: int = 0,
    weights: int | None = None,
    run_id: str = RUN,
    num_groups: int | None = None,
) -> Trainer:
    """Take groups all the way to an acknowledged step; `weights` is the generator's version, `version` if not given.

    `num_groups` counts those that were submitted before, too.
    """
    count = len(names) if num_groups is None else num_groups
    if names:
        await broker.submit(*(prompt(name) for name in names), run_id=run_id)
    generator = Generator.connect(broker.channel, run_id=run_id)
    worker, trainer = (kind.connect(broker.channel, run_id=run_id) for kind in (Worker, Trainer))
    generator.beat(credits=2 * count, version=version if weights is None else weights)
    await generator.finish(await generator.leases(2 * count))
    await worker.score(2 * count)
    await ack_step(trainer, count, version=version, run_id=run_id)
    return trainer


async def ack_step(trainer: Trainer, num_groups: int, *, version: int, run_id: str = RUN) -> list[str]:
    """Take ready groups and acknowledge them as one step; returns their ids."""
    names = [group.prompt.group_id for group in await trainer.groups(num_groups)]
    await trainer.ack(names, version + 1, run_id=run_id)
    return names
