"""A trainer process: TrainerService and WeightStoreService over gRPC, weights over HTTP."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from urllib.parse import urlsplit

from penstock.network.http_server import public_url
from penstock.network.metrics_server import serve_metrics
from penstock.network.readiness import follow_outage
from penstock.network.rpc import Server, run_until_stopped, service_of
from penstock.process.bound_child import end_group_with_parent
from penstock.process.grace_periods import CHECKPOINT_S
from penstock.security import Security
from penstock.security.registered_addresses import OwnAddresses
from services.trainer.config import TrainerConfig, TrainingConfig
from services.trainer.distributed.launch import Place, check_size, check_trust, stay_on_loopback
from services.trainer.distributed.torchrun_runs import TorchrunRuns
from services.trainer.folders.allowed_roots import Roots
from services.trainer.folders.kept_run import KeptRun, kept_path
from services.trainer.publishing.broadcast_server import broadcasting
from services.trainer.publishing.publisher import serving_weights
from services.trainer.publishing.version_store import TRUSTED_SETTING, WeightStore, WeightStoreService
from services.trainer.run.context import Policy, RunSpec
from services.trainer.run.training_run import TrainingRun
from services.trainer.service import TrainerService


async def serve(config: TrainerConfig) -> None:
    """Serve until SIGTERM or SIGINT; the current run writes a checkpoint before the server ends.

    The run is kept in `state_dir` and resumed when a trainer starts there again.

    Under torchrun the first process serves; the others do their parts of its runs until it ends.

    Raises:
        PortUnavailableError: An address cannot be listened on.
        ConfigError: Its processes would talk unprotected over a network.
    """
    place = Place.read(os.environ)
    security = Security.from_environment(insecure=config.insecure)
    check_trust(place, security, trusts_network=config.trusts_network)
    if place is not None:
        # torchrun ends its processes itself unless it is killed: they would keep the ports and the GPUs.
        end_group_with_parent(os.getppid(), grace_s=CHECKPOINT_S)
    if place is not None and not place.spans_machines:
        stay_on_loopback()
    if place is not None and place.rank > 0:
        await _follow(place)
        return
    store, stated_url = WeightStore(), None
    if config.weights_url is not None:
        stated_url = public_url(config.weights_url, setting="weights_url", security=security)
    serve_metrics(config.metrics_address, security)
    async with (
        serving_weights(
            store,
            listen=config.weights_listen,
            security=security,
            max_bytes_per_second=config.max_weights_bytes_per_second,
        ) as url,
        broadcasting(config, store=store, weights_url=stated_url or url, security=security) as broadcasts,
    ):
        await _serve_grpc(
            config,
            store=store,
            weights=WeightStoreService(
                store,
                broadcasts=broadcasts,
                own_addresses=OwnAddresses(config.trusted_relay_hosts, setting=TRUSTED_SETTING),
            ),
            weights_url=stated_url or url,
            security=security,
            place=place,
        )


async def _follow(place: Place) -> None:
    from services.trainer.distributed.rank_worker import end_while_idle
    from services.trainer.worker_process import follow_under_torchrun

    runs = TorchrunRuns()
    end_while_idle(lambda: runs.is_under_way)
    await asyncio.to_thread(follow_under_torchrun, place, runs)


async def _serve_grpc(
    config: TrainerConfig,
    *,
    store: WeightStore,
    weights: WeightStoreService,
    weights_url: str,
    security: Security,
    place: Place | None,
) -> None:
    torchrun = TorchrunRuns() if place is not None else None

    def load(run: TrainingConfig) -> Policy:
        check_size(place, len(run.trainer.shares))
        # Imported when the first run begins, in the compute thread: torch takes seconds, meanwhile the server answers.
        from services.trainer.run.policy_loading import load_policy

        return load_policy(run, torchrun)

    def make_run(spec: RunSpec) -> TrainingRun:
        return TrainingRun(spec, store=store, weights_url=weights_url, load_policy=load, security=security)

    kept = KeptRun(kept_path(config.state_dir, config.listen))
    roots = Roots(config.allowed_roots, config.allowed_storage, runs_dir=config.runs_dir)
    trainer = TrainerService(make_run=make_run, weights_url=weights_url, kept=kept, roots=roots)
    server = Server(
        listen=config.listen,
        services=[
            service_of(trainer),
            service_of(weights),
        ],
        security=security,
        public_hosts=[urlsplit(weights_url).hostname or ""] if config.weights_url is not None else [],
    )
    trainer.warnings = lambda: [*server.certificate_problems, *weights.failures.lines()]
    trainer.stopping = weights.stopping = server.stopping
    try:
        await run_until_stopped(
            server,
            loops=[partial(follow_outage, server.set_serving, lambda: trainer.broker_outage)],
            on_started=trainer.resume_kept,
            before_stop=lambda: trainer.stop(timeout_s=CHECKPOINT_S),
        )
    finally:
        if torchrun is not None:
            torchrun.end()
