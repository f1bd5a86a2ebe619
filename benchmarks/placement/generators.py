"""Two generators with a real vLLM engine each, behind their OpenAI-compatible endpoints, in this process.

The engines compute in processes of their own. The model has random weights: what it says means nothing, what it costs
is real.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from benchmarks.made_models import make_model
from benchmarks.placement.presence import heard
from benchmarks.placement.rounds import VOCAB_SIZE, Serving
from benchmarks.tools.rate import memory_broker
from console.launch.ports import free_addresses
from penstock.clients.broker import BrokerClient
from penstock.clients.sharding.sharded_tokens import ShardedTokens
from penstock.clock import SystemClock
from penstock.network.connection import Connection
from penstock.process.busy_time import BusyTracker
from penstock.security import NO_SECURITY
from penstock.v1 import broker_pb2, weights_pb2
from quickstart.tiny_model import build_tokenizer
from services.generator.config import GeneratorConfig, OpenAIConfig
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.unleased import UnleasedSamples
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.model_files import IdText
from services.generator.engines.base_config import ServedModel
from services.generator.engines.vllm.config import VllmEngineConfig
from services.generator.engines.vllm.vllm_engine import VllmEngine
from services.generator.metrics import GeneratorMetrics
from services.generator.openai.server import OpenAIEndpoint
from services.generator.openai.sessions.metrics import OpenAIMetrics

RUN, NUM_GENERATORS = "placement", 2
MAX_CONTEXT = 2048
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_CONTEXT,
    "tie_word_embeddings": True,
}
"""13 million parameters."""
DTYPE: Final = "float32"
"""Not every CPU has instructions for bfloat16."""
KV_CACHE_GIB = 1.0
"""More than all sessions of a round fill: what is missed was computed elsewhere, not evicted."""


def write_model(folder: Path) -> Path:
    """The model and a tokenizer, which the endpoints ask for."""
    make_model(folder, SHAPE)
    build_tokenizer().save_pretrained(folder)
    return folder


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Sequence[Serving]]:
    """Both generators, which know each other, of the model in `folder`."""
    addresses = free_addresses(NUM_GENERATORS)
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(memory_broker())
        client = await stack.enter_async_context(BrokerClient(broker))
        # Room for all sessions, none of which is finished: nothing is trained on here.
        limits = broker_pb2.RunLimits(
            groups_per_step=1024, group_size=1, max_staleness=1, max_completion_tokens=MAX_CONTEXT
        )
        await client.open_run(RUN, limits=limits, policy_version=0)
        found = []
        for address in addresses:
            engine = VllmEngine(
                VllmEngineConfig(kv_cache_gib=KV_CACHE_GIB), ServedModel(model_path=folder, dtype=DTYPE)
            )
            await engine.start()
            stack.push_async_callback(engine.stop)
            await stack.enter_async_context(_endpoint(engine, folder, broker, address, addresses))
            found.append(Serving(address=address, engine=engine))
        yield found


@asynccontextmanager
async def _endpoint(
    engine: VllmEngine, folder: Path, broker: str, address: str, peers: Sequence[str]
) -> AsyncIterator[None]:
    held = AttestedWeights()
    await held.attest(weights_pb2.WeightsManifest(policy_version=0, history=0, digest="d"))

    def fail(error: Exception) -> None:
        raise error

    async with Connection(broker) as connection, heard(connection, run_id=RUN, generator_id=address):
        parts = RolloutParts(
            engine=engine,
            tokens=ShardedTokens(connection, run_id=RUN, generator_id=address, flush_interval_s=0.2),
            held=held,
            text=IdText(),
            end_token_ids=(),
            busy=BusyTracker(SystemClock()),
            metrics=GeneratorMetrics(CollectorRegistry()),
            on_change=lambda: None,
            on_engine_failure=fail,
        )
        config = GeneratorConfig(
            run_id=RUN,
            broker=broker,
            model_path=folder,
            cache_dir=folder,
            openai=OpenAIConfig(listen=address, peers=tuple(peers), model_name="model"),
        )
        endpoint = OpenAIEndpoint(
            config,
            unleased=UnleasedSamples(
                generator_id=address, rollouts=Rollouts(parts, max_concurrent_samples=128), parts=parts
            ),
            security=NO_SECURITY,
            judges=NO_SECURITY,
            metrics=OpenAIMetrics(CollectorRegistry()),
        )
        async with endpoint.serving():
            yield
