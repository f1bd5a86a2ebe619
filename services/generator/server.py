"""A generator process: builds the engine, serves GeneratorService, leases and decodes until it is told to stop.

The service reports healthy once the engine is built. SIGTERM and SIGINT give unfinished samples back to the broker and
end the process within seconds; an engine failure does the same and ends it with an error.
"""

from __future__ import annotations

from penstock.rpc import Server, Service, run_until_stopped
from penstock.security import Security
from penstock.telemetry import serve_metrics
from penstock.v1 import generator_pb2, generator_pb2_grpc
from services.generator.config import GeneratorConfig
from services.generator.engines import build_engine
from services.generator.generator import Generator
from services.generator.metrics import GeneratorMetrics
from services.generator.model_folder import load_text_decoder
from services.generator.service import GeneratorServicer

SERVICE_NAME = generator_pb2.DESCRIPTOR.services_by_name["GeneratorService"].full_name


async def serve(config: GeneratorConfig) -> None:
    """Run a generator until SIGTERM or SIGINT.

    Raises:
        PortUnavailableError: The address cannot be listened on.
        EngineError, DigestMismatchError: The engine did not start.
        GeneratorFailedError: The engine failed while it decoded.
    """
    security = Security.from_environment()
    serve_metrics(config.metrics_port)
    text = load_text_decoder(config.model_path, is_tokenizer_needed=config.engine.engine != "emulated")
    generator = Generator(config, engine=build_engine(config), text=text, metrics=GeneratorMetrics(), security=security)
    service = Service(
        name=SERVICE_NAME,
        add=generator_pb2_grpc.add_GeneratorServiceServicer_to_server,
        servicer=GeneratorServicer(generator),
    )
    server = Server(listen=config.listen, services=[service], security=security)

    async def run_engine() -> None:
        await server.set_serving(False)
        await generator.run_engine(on_ready=lambda: server.set_serving(True))

    async with generator:
        await run_until_stopped(
            server,
            loops=[
                run_engine,
                generator.send_tokens,
                generator.watch_weights,
                generator.pull_weights,
                generator.take_leases,
            ],
            before_stop=generator.stop,
        )
