"""An OpenAI-compatible endpoint over a real broker, called by the real `openai` client; the engine is planned."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken

from penstock.clock import Clock, SystemClock
from penstock.process.busy_time import BusyTracker
from penstock.security import NO_SECURITY, Security
from penstock.v1.weights_pb2 import WeightsManifest
from quickstart.tiny_model import build_model, build_tokenizer, save_model
from services.broker.storage.memory_store import MemoryStore
from services.generator.config import GeneratorConfig, OpenAIConfig
from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.decoding.unleased import UnleasedSamples
from services.generator.engine.attested_weights import AttestedWeights
from services.generator.engine.engine import EngineProfile, EngineStats, EngineStoppedError, FinishReason, TokenSpan
from services.generator.engine.model_files import IdText, end_token_ids
from services.generator.metrics import GeneratorMetrics
from services.generator.openai.server import OpenAIEndpoint
from services.generator.openai.sessions.metrics import OpenAIMetrics
from tests.helpers.brokers.broker import RUN, RunningBroker, Trainer, serving

END = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LIMITS = {"groups_per_step": 4, "group_size": 2, "max_completion_tokens": 2048, "max_staleness": 1}


def chat_tokenizer() -> Any:
    """A byte tokenizer with the turn marks of Qwen's models."""
    tokenizer = build_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", END)])
    tokenizer.eos_token = END
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_chat_model(directory: Path, *, has_weights: bool = False) -> Path:
    """A model's folder: its tokenizer, its configuration, and an untrained model's weights where they are needed."""
    tokenizer = chat_tokenizer()
    if has_weights:
        save_model(build_model(tokenizer, seed=0), tokenizer, directory)
        return directory
    tokenizer.save_pretrained(directory)
    end_id = tokenizer.convert_tokens_to_ids(END)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": end_id}))
    return directory


class PlannedEngine:
    """Answers what `plan` says: a text, which is followed by the end token, or token ids as they are."""

    def __init__(self, tokenizer: Any, plan: Callable[[str], str | list[int]]) -> None:
        self.tokenizer = tokenizer
        self.plan = plan
        self.requests: list[Any] = []
        self.policy_version = 0
        self.max_model_len = 4096
        self.span_tokens = 3
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.is_dead = False
        self.num_running = 0

    @property
    def prompts(self) -> list[str]:
        """What was asked, as text with its marks."""
        return [self.tokenizer.decode(list(request.prompt_token_ids)) for request in self.requests]

    async def generate(self, request: Any) -> AsyncIterator[TokenSpan]:
        self.requests.append(request)
        planned = self.plan(self.prompts[-1])
        if isinstance(planned, str):
            planned = [*self.tokenizer.encode(planned), self.tokenizer.eos_token_id]
        token_ids = planned[: request.sampling.max_new_tokens]
        num_prompt, number = len(request.prompt_token_ids), len(self.requests)
        # Rows that say their position's token and the request that computed them.
        whole = [*request.prompt_token_ids, *token_ids]
        rows = np.array([[[token_id % 256, number]] for token_id in whole], np.uint8)
        reason = FinishReason.STOP if token_ids[-1] in request.sampling.stop_token_ids else FinishReason.LENGTH
        self.num_running += 1
        try:
            for start in range(0, len(token_ids), self.span_tokens):
                await self.may_answer.wait()
                if self.is_dead:
                    raise EngineStoppedError("planned death")
                part = token_ids[start : start + self.span_tokens]
                yield TokenSpan(
                    token_ids=np.asarray(part, np.int32),
                    logprobs=np.asarray([-0.01 * (start + i + 1) for i in range(len(part))], np.float32),
                    policy_version=self.policy_version,
                    finish_reason=reason if start + len(part) == len(token_ids) else None,
                    routes=rows[start and num_prompt - 1 + start : num_prompt - 1 + start + len(part)]
                    if request.has_routes
                    else None,
                )
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1

    async def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def profile(self) -> EngineProfile:
        return EngineProfile(max_concurrent_samples=64)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_running,
            num_waiting=0,
            kv_cache_usage=0.0,
            num_preemptions=0,
            tokens_generated=0,
            tokens_sampled=0,
        )


def _counts(metric: Any) -> Counter[str]:
    """A Prometheus counter's values by its one label."""
    samples = [sample for family in metric.collect() for sample in family.samples if sample.name.endswith("_total")]
    return Counter({label: sample.value for sample in samples for label in sample.labels.values()})


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a test talks to."""

    broker: RunningBroker
    engine: Any
    endpoint: OpenAIEndpoint
    rollouts: Rollouts
    held: AttestedWeights
    metrics: OpenAIMetrics
    tokenizer: Any
    base_url: str
    failures: list[Exception]
    loop_task: asyncio.Task[None]
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        """Sessions ended, by outcome."""
        return _counts(self.metrics.sessions)

    @property
    def records(self) -> Counter[str]:
        """Sessions at the broker, by outcome."""
        return _counts(self.metrics.records)

    @property
    def dropped_branches(self) -> Counter[str]:
        """Branches left out, by reason."""
        return _counts(self.metrics.branches)

    def client(self, session: str | None = None, group: str | None = None, **settings: Any) -> AsyncOpenAI:
        headers = {"X-Penstock-Session": session, "X-Penstock-Group": group}
        client = AsyncOpenAI(
            **{
                "base_url": self.base_url,
                "api_key": "none",
                "max_retries": 0,
                "timeout": 45,
                "default_headers": {name: value for name, value in headers.items() if value is not None},
                **settings,
            }
        )
        self.clients.append(client)
        return client

    async def reward(self, session: str, reward: float | None = None, **more: Any) -> dict[str, Any]:
        """Through the client's own connection, as an agent would."""
        body = more if reward is None else {"reward": reward, **more}
        return await self.client().post(f"/sessions/{session}/reward", cast_to=object, body=body)

    async def open_run(self, *, version: int, **changes: Any) -> None:
        """Bring the run to a version, as its trainer's ledger would."""
        await self.broker.open(version=version, **(LIMITS | changes))

    async def groups(self, count: int) -> list[Any]:
        """What the trainer is handed."""
        return await Trainer.connect(self.broker.channel).groups(count)


@asynccontextmanager
async def endpoint_bench(
    model_path: Path,
    plan: Callable[[str], str | list[int]] = lambda _prompt: "ok",
    *,
    engine: Any = None,
    limits: dict[str, Any] | None = None,
    policy: Any = None,
    security: Security = NO_SECURITY,
    judges: Security = NO_SECURITY,
    broker_security: Security = NO_SECURITY,
    secret: str | None = None,
    is_run_open: bool = True,
    max_concurrent_samples: int = 8,
    clock: Clock | None = None,
    shared_broker: RunningBroker | None = None,
    generator_id: str = "gen-0",
    **settings: Any,
) -> AsyncIterator[Bench]:
    """A served broker with an open run, or one that is shared, a served endpoint, and its loop."""
    tokenizer = chat_tokenizer()
    engine = engine or PlannedEngine(tokenizer, plan)
    failures: list[Exception] = []
    shared = nullcontext(shared_broker) if shared_broker else serving(MemoryStore(), security=broker_security)
    async with shared as broker:
        if is_run_open and shared_broker is None:
            await broker.open(policy=policy, **(LIMITS | (limits or {})))
        held, generator_metrics = AttestedWeights(), GeneratorMetrics(CollectorRegistry())
        await held.attest(WeightsManifest(policy_version=0, history=0, digest="d"))
        ends = end_token_ids(model_path)
        parts = RolloutParts(
            engine=engine,
            records_routes="routing" in (limits or {}),
            tokens=None,
            held=held,
            text=IdText(),
            end_token_ids=ends,
            busy=BusyTracker(SystemClock()),
            metrics=generator_metrics,
            on_change=lambda: None,
            on_engine_failure=failures.append,
        )
        rollouts = Rollouts(parts, max_concurrent_samples=max_concurrent_samples)
        unleased = UnleasedSamples(generator_id=generator_id, rollouts=rollouts, parts=parts)
        config = GeneratorConfig(
            run_id=RUN,
            broker=f"127.0.0.1:{broker.server.port}",
            model_path=model_path,
            cache_dir=model_path,
            openai=OpenAIConfig(**({"listen": "127.0.0.1:0", "model_name": "tiny"} | settings)),
        )
        metrics = OpenAIMetrics(CollectorRegistry())
        endpoint = OpenAIEndpoint(
            config, unleased=unleased, security=security, judges=judges, metrics=metrics, secret=secret, clock=clock
        )
        async with endpoint.serving() as base_url:
            loop_task = asyncio.create_task(endpoint.run())
            bench = Bench(
                broker=broker,
                engine=engine,
                endpoint=endpoint,
                rollouts=rollouts,
                held=held,
                metrics=metrics,
                tokenizer=tokenizer,
                base_url=base_url,
                failures=failures,
                loop_task=loop_task,
            )
            try:
                yield bench
            finally:
                for client in bench.clients:
                    await client.close()
                loop_task.cancel()
                await asyncio.gather(loop_task, return_exceptions=True)
