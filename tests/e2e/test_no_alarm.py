"""A healthy run raises no alarm: Prometheus watches its five services by the rules as deployed, and compressed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from quickstart.prepare import Prepared
from tests.e2e.runs import RUN_ID, assert_balanced, running, small_run
from tests.helpers.observability.compressed_rules import rules, write_rules
from tests.helpers.observability.dashboards import empty_panels
from tests.helpers.observability.prometheus import needs_prometheus, prometheus
from tests.helpers.observability.served import Served, started
from tests.helpers.ports import free_port
from tests.helpers.stores.redis_server import RedisProcess

pytestmark = [needs_prometheus, pytest.mark.e2e, pytest.mark.grid, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 12
FACTOR = 60
"""The rules are for steps of minutes; these are of seconds."""

EMPTY = {
    # Nothing of the kind happened.
    *("Calls tried again", "Chunks refused", "Commits another broker was before", "Faults of Redis"),
    *("Samples dropped, by reason", "Share dropped, by length"),
    # The run has no plan, broadcast, sources of data, parts of a reward, judges, environment or agents.
    *("Measured over planned", "Planned dollars a million tokens", "Revisions of the plan"),
    *("Broadcasts", "Mean reward, by source", "Pass rate, by source", "Parts of a composite, by status"),
    *("Judges: cost an hour", "Judges: requests", "Judges: time of an answer", "Sessions of agents"),
    *("Environments: calls, by outcome", "Environments: time of a call", "Sessions with environments"),
}
"""Panels without a series on such a run."""


async def test_a_healthy_run_fires_nothing_and_fills_the_dashboards(task: Prepared, tmp_path: Path) -> None:
    redis = RedisProcess(tmp_path, is_persistent=True)
    services = _services(task, tmp_path, redis.url)
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        redis.start()
        stack.enter_context(started(*services.values()))
        as_deployed = write_rules(tmp_path, factor=1, suffix="AsDeployed")
        seen = await stack.enter_async_context(
            prometheus(tmp_path / "prometheus", factor=FACTOR, more_rules=[as_deployed], scrape_every="1s")
        )
        for name, service in services.items():
            if name != "generator":
                # Which serves once the trainer has its first weights.
                await service.until_serving()
            seen.watch(name, service.metrics)
        run = stack.enter_context(running(_configuration(task, tmp_path, services), tmp_path))
        while run.process.poll() is None:
            await seen.until_read(*(service.metrics for service in services.values()))
        assert run.end() == 0, run.text
        assert_balanced(run.summary(), num_samples=NUM_STEPS * 8 * 4)
        infos = {rule["alert"] for rule in rules() if rule["labels"]["severity"] == "info"}
        # What is a hint, not an alarm, may be true here: on few cores samples come slowly.
        assert await seen.ever_fired() - infos == set()
        assert await seen.query("query", query="max(penstock_trainer_steps_total)"), "the trainer was not read"
        assert await empty_panels(seen) - EMPTY == set()


def _services(task: Prepared, folder: Path, redis_url: str) -> dict[str, Served]:
    scheduler = Served("scheduler", folder)
    broker = Served("broker", folder, f"redis_url={redis_url}", f"scheduler={scheduler.address}")
    trainer = Served(
        "trainer",
        folder,
        f"weights_listen=127.0.0.1:{free_port()}",
        f"allowed_roots=[{folder},{task.model_dir.parent}]",
        f"state_dir={folder / 'state'}",
    )
    of_run = (f"run_id={RUN_ID}", f"broker={broker.address}")
    reward = Served("reward", folder, *of_run, f"tokenizer_path={task.model_dir}", "reward.model=exact_match")
    generator = Served(
        "generator",
        folder,
        *of_run,
        f"weights={trainer.address}",
        f"model_path={task.model_dir}",
        f"cache_dir={folder / 'cache'}",
        "dtype=float32",
        "engine.engine=transformers",
        "engine.max_concurrent_samples=32",
    )
    made = (scheduler, broker, trainer, reward, generator)
    return {service.service: service for service in made}


def _configuration(task: Prepared, folder: Path, services: dict[str, Served]) -> dict[str, object]:
    endpoints = {name: services[name].address for name in ("broker", "scheduler", "reward", "trainer")}
    document = small_run(task, folder, run__num_steps=NUM_STEPS)
    document["endpoints"] = {**endpoints, "generators": [services["generator"].address]}
    return document
