"""What a generator says of itself when it opens its lease stream."""

from __future__ import annotations

from penstock.model.routers import read_routers
from penstock.v1 import broker_pb2, types_pb2
from services.generator.config import GeneratorConfig
from services.generator.engine.engine import Engine, EngineProfile


def generator_hello(
    config: GeneratorConfig,
    engine: Engine,
    *,
    generator_id: str,
    replaces_generator_id: str,
    routing: types_pb2.RoutingShape | None,
    listens_in_plain_text: bool,
) -> broker_pb2.GeneratorHello:
    """The first message of a lease stream.

    Args:
        config: The generator's settings.
        engine: Started.
        generator_id: Its id.
        replaces_generator_id: The id of the process that worked in the same folder before; empty if none did.
        routing: See `routing_shape`.
        listens_in_plain_text: Whether other machines reach one of its listeners without TLS.
    """
    num_waiting = 0 if config.environment is None else config.environment.max_waiting
    return broker_pb2.GeneratorHello(
        run_id=config.run_id,
        generator_id=generator_id,
        site=config.site,
        engine=config.engine.engine,
        max_context_tokens=engine.max_model_len,
        endpoint=config.listen,
        profile=_profile(engine.profile(), max_leases=config.engine.max_concurrent_samples, num_waiting=num_waiting),
        listens_in_plain_text=listens_in_plain_text,
        routing=routing,
        has_environment=config.environment is not None,
        replaces_generator_id=replaces_generator_id,
    )


def routing_shape(config: GeneratorConfig) -> types_pb2.RoutingShape | None:
    """The shape of the routes that it records; None if it records none. Raises NoRoutersError."""
    if not config.records_routes:
        return None
    return read_routers(config.model_folder, field="records_routes").shape.to_proto()


def _profile(profile: EngineProfile, *, max_leases: int, num_waiting: int) -> broker_pb2.GeneratorProfile:
    return broker_pb2.GeneratorProfile(
        kv_capacity_tokens=profile.kv_capacity_tokens or 0,
        max_concurrent_samples=min(profile.max_concurrent_samples, max_leases) + num_waiting,
        step_base_s=profile.step_base_s or 0.0,
        step_per_sample_s=profile.step_per_sample_s or 0.0,
        step_per_kv_token_s=profile.step_per_kv_token_s or 0.0,
        prefill_tokens_per_second=profile.prefill_tokens_per_second or 0.0,
    )
