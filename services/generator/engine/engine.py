"""The engine interface: what a generator needs from an engine, and what every engine promises.

Promises, checked for every engine by `tests/contract/engines/test_engines.py`:

- A span's tokens were all sampled by the version it carries; a sample that lives through an update yields spans of the
  old version, then of the new one. No token is yielded twice and none is left out.
- Only the last span of a sample has a finish reason, and every sample that is not cancelled gets one.
- Log-probs are in nats, of the sampled token, under the distribution it was drawn from: after temperature, top-k and
  top-p. Greedy tokens (temperature 0) carry the log-prob under the unmodified distribution.
- No token is sampled by weights whose update failed: the engine then stays paused until an update succeeds.
- After an update that recomputes, a sample's log-probs are those of the new weights over its whole context; after one
  that keeps, those of the new weights over the old ones' KV.

- Routes are those of the forward passes that sampled: a position that is computed again, since another sample joins,
  the cache is dropped or another engine goes on from a prefix, keeps the row that came first.

The caller owns deadlines of samples (its leases): it cancels the iteration or calls `abort`. This module must import
without torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.v1 import weights_pb2
from penstock.wire.routes import Routes

MAX_REQUEST_ID_CHARACTERS = 256
TIED_HEAD = "lm_head.weight"
"""A model that ties its output head to the embedding may be saved with or without this tensor."""
_MAX_SEED = 2**63 - 1


class EngineError(Exception):
    """An engine cannot do what was requested."""


class UnusableModelError(EngineError):
    """The model's files do not fit one another: no start with them succeeds."""


class EngineStoppedError(EngineError):
    """The engine is not running: not started yet, stopped, or dead."""


class EngineHungError(EngineError):
    """The engine owes tokens, or an installation, and makes no progress."""


class RequestRefusedError(EngineError):
    """This engine can never decode the request: too long, an unknown token, or an id that is in use."""


class UpdateMode(StrEnum):
    """What happens to samples under way when a version is installed."""

    KEEP = "keep"
    """They continue at once, over the KV cache of the old weights (PipelineRL, arXiv 2509.19128)."""
    RECOMPUTE = "recompute"
    """They continue once their KV cache is recomputed under the new weights (AReaL, arXiv 2505.24298)."""
    DRAIN = "drain"
    """They end under the old weights first, so each sample has one version."""


class FinishReason(StrEnum):
    """Why a sample got its last token."""

    STOP = "stop"
    """It sampled a stop token; the stop token is its last token."""
    LENGTH = "length"
    """It reached `max_new_tokens`, or the context is full."""
    ABORTED = "aborted"
    """`abort` was called, or the engine stopped; what was yielded so far is valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn. Raises ValueError on values out of range."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Smallest set of tokens with this probability, in (0, 1]; 1 keeps all."""
    top_k: int | None = None
    """Keep this many most likely tokens; unset keeps all."""
    max_new_tokens: int
    """Most completion tokens, the prefix's included."""
    seed: int | None = None
    """Makes a sample repeatable on the same engine; unset draws from the engine's own stream."""
    stop_token_ids: tuple[int, ...] = ()
    """A sample ends after any of these."""

    def __post_init__(self) -> None:
        """Refuse what no engine could honour."""
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature must be in [0, 100], not {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be positive, not {self.top_k}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be positive, not {self.max_new_tokens}")
        if self.seed is not None and not 0 <= self.seed <= _MAX_SEED:
            raise ValueError(f"seed must be in [0, 2**63), not {self.seed}")

    def seed_after(self, num_prefix_tokens: int) -> int | None:
        """The seed for going on after `num_prefix_tokens`; a continuation must not replay the first tokens' draws."""
        if self.seed is None or num_prefix_tokens == 0:
            return self.seed
        state = np.random.SeedSequence([self.seed, num_prefix_tokens]).generate_state(1, np.uint64)
        return int(state[0]) & _MAX_SEED


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sample to decode, from its beginning or from where another lease left it."""

    request_id: str
    """Unique among the engine's unfinished requests."""
    prompt_token_ids: tuple[int, ...]
    """The prompt, at least one token."""
    prefix_token_ids: tuple[int, ...] = ()
    """Completion tokens accepted from an earlier lease; only what follows them is decoded and yielded."""
    sampling: SamplingSettings
    """How to draw."""
    has_routes: bool = False
    """Whether its spans carry routes; only of an engine that was built to record them."""

    def __post_init__(self) -> None:
        """Refuse what no engine could decode."""
        if not 0 < len(self.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            raise ValueError(f"request_id must have 1 to {MAX_REQUEST_ID_CHARACTERS} characters")
        if not self.prompt_token_ids:
            raise ValueError("the prompt has no tokens")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSpan:
    """Consecutive completion tokens sampled by one policy version."""

    token_ids: npt.NDArray[np.int32]
    """[num_tokens]; empty only where a finish reason brings no token."""
    logprobs: npt.NDArray[np.float32]
    """[num_tokens], nats."""
    policy_version: int
    """The version that sampled every token of the span."""
    finish_reason: FinishReason | None = None
    """Set on the last span of the sample."""
    routes: Routes | None = None
    """The experts of each position that a token was drawn from, a row a token; before them, in the first span of a
    sample without a prefix, those of the prompt's other positions. None if they were not asked for."""

    @classmethod
    def empty(cls, *, policy_version: int, finish_reason: FinishReason) -> Self:
        """A last span without tokens."""
        return cls(
            token_ids=np.empty(0, np.int32),
            logprobs=np.empty(0, np.float32),
            policy_version=policy_version,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """A version to install, as a file on this machine."""

    policy_version: int
    """The version."""
    path: Path
    """One safetensors file with Hugging Face names; must not change until the update returns."""
    tensors: Sequence[weights_pb2.TensorInfo]
    """The tensors that the file, and afterwards the engine, must hold."""
    digest: str
    """`penstock.model.digests.manifest_digest` of the tensors."""
    adapter: weights_pb2.AdapterInfo | None = None
    """How the file is applied if it is a LoRA adapter."""
    is_recomputing: bool = False
    """Whether samples under way recompute their KV cache under these weights, or keep it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReport:
    """The result of an update."""

    policy_version: int
    """The version the engine samples with from now on."""
    digest: str
    """Digest of the engine's weights, read back from it."""
    pause_s: float
    """How long no token was sampled; with recomputation, up to the first token after it."""
    num_recomputed_tokens: int = 0
    """Prompt and completion tokens whose KV was recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """The engine's load; counters count from its start."""

    num_running: int
    """Samples being decoded."""
    num_waiting: int
    """Samples accepted but not being decoded."""
    kv_cache_usage: float
    """Used part of the KV cache, 0 to 1."""
    num_preemptions: int
    """Times a running sample lost its KV cache for lack of space; recomputing for an update does not count."""
    tokens_generated: int
    """Tokens yielded."""
    tokens_sampled: int
    """Tokens sampled, yielded or not: grows as long as the engine works, even if they are not consumed."""
    install_signs: int | None = None
    """Changes while an installation of weights makes progress; None without one."""
    prompt_tokens: int = 0
    """Tokens of prompts and prefixes that the engine was given; 0 where it has no prefix cache."""
    cached_tokens: int = 0
    """Those of them whose keys and values were in its prefix cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """An engine's own speed and capacity, for dispatch; None where unknown.

    A decode step of n samples with k KV tokens takes step_base_s + n * step_per_sample_s + k * step_per_kv_token_s.
    """

    max_concurrent_samples: int
    """Most samples decoded at once."""
    kv_capacity_tokens: int | None = None
    """KV capacity, tokens."""
    kv_block_tokens: int = 1
    """A sample's KV cache grows by this many tokens at a time."""
    step_base_s: float | None = None
    """The part of a decode step's time that is independent of the number of samples."""
    step_per_sample_s: float | None = None
    """Time each sample adds to a step."""
    step_per_kv_token_s: float | None = None
    """Time each KV token adds to a step."""
    prefill_tokens_per_second: float | None = None
    """Prompt and prefix tokens prefilled in a second."""


class Engine(Protocol):
    """Decodes samples and installs weights in flight. All methods belong to one event loop."""

    @property
    def policy_version(self) -> int:
        """The version new tokens are sampled with."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt + completion, in tokens."""

    async def start(self) -> None:
        """Loads the model and attests it; returns when `generate` may be called. Raises EngineError."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenSpan, None]:
        """Decodes one sample; closing the iterator (`contextlib.aclosing`) aborts it.

        A prefix that already ends the sample yields one empty last span.

        Raises:
            RequestRefusedError: This engine can never decode it.
            EngineStoppedError: The engine is not running, or died meanwhile.
        """

    async def abort(self, request_id: str) -> None:
        """Ends a sample: its iteration yields a last span ABORTED. An unknown id is no error: it may have finished."""

    async def update_weights(self, update: WeightUpdate) -> UpdateReport:
        """Installs a version while samples continue; one update at a time, a second waits for the first.

        Raises:
            WeightsMismatchError: The file is not what the digests state, or not this model's tensors: the engine goes
                on with what it had. Or the engine does not hold what the file states after loading it: it samples
                nothing more until an update succeeds.
            EngineStoppedError: The engine is not running.
            EngineError: Loading broke off; the engine samples nothing more, restart it.
        """

    def profile(self) -> EngineProfile:
        """Speed and capacity; known once started."""

    def stats(self) -> EngineStats:
        """The load now; never waits."""

    async def stop(self) -> None:
        """Ends all samples as ABORTED and frees everything; may be called twice."""


@runtime_checkable
class PausableEngine(Protocol):
    """An engine that can pause between two decoding steps and keep all its state."""

    async def pause(self) -> None:
        """Stop sampling until `resume`; idempotent."""

    async def resume(self) -> None:
        """Continue sampling; idempotent."""


def check_request(request: GenerateRequest, *, max_model_len: int, vocab_size: int) -> None:
    """Raise RequestRefusedError if a model of this size cannot decode the request."""
    num_tokens = len(request.prompt_token_ids) + len(request.prefix_token_ids)
    if num_tokens >= max_model_len:
        raise RequestRefusedError(f"prompt and prefix have {num_tokens} tokens, the context holds {max_model_len}")
    for token_ids in (request.prompt_token_ids, request.prefix_token_ids):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            raise RequestRefusedError(f"token ids must be in [0, {vocab_size})")


def finished_by_prefix(request: GenerateRequest) -> FinishReason | None:
    """Why nothing is left to decode after the prefix; None if something is."""
    prefix = request.prefix_token_ids
    if prefix and prefix[-1] in request.sampling.stop_token_ids:
        return FinishReason.STOP
    if len(prefix) >= request.sampling.max_new_tokens:
        return FinishReason.LENGTH
    return None


def max_tokens_left(request: GenerateRequest, *, max_model_len: int) -> int:
    """Tokens that may follow the prefix: the request's limit, or the remaining context."""
    num_prefix = len(request.prefix_token_ids)
    room = max_model_len - len(request.prompt_token_ids) - num_prefix
    return min(request.sampling.max_new_tokens - num_prefix, room)
