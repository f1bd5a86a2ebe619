"""Decodes samples without a lease: same engine, same slots, same weights."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from services.generator.decoding.rollout_parts import RolloutParts
from services.generator.decoding.sample_runner import Rollouts
from services.generator.engine.engine import EngineError, GenerateRequest, RequestRefusedError, TokenSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class UnleasedSamples:
    """What another part of the process needs to decode beside the leases."""

    generator_id: str
    """This process' name at the broker."""
    rollouts: Rollouts
    parts: RolloutParts
    """Those of the rollouts."""

    @property
    def run_history(self) -> int | None:
        """The history counter of the loaded weights; None before the first."""
        held = self.parts.held.current
        return None if held is None else held.history

    @property
    def policy_version(self) -> int | None:
        """The loaded version; None before the first."""
        held = self.parts.held.current
        return None if held is None else held.policy_version

    async def decode(self, request: GenerateRequest, *, wait_s: float) -> AsyncGenerator[TokenSpan, None]:
        """Decode one sample; close the iteration (`contextlib.aclosing`) to give it up.

        Raises:
            TimeoutError: No slot came free within `wait_s` seconds, or no weights arrived.
            RequestRefusedError: The engine can never decode it.
            EngineError: It drains, or failed.
        """
        async with self.rollouts.unleased(timeout_s=wait_s):
            try:
                async with aclosing(self.parts.engine.generate(request)) as spans:
                    while (span := await self._next(spans)) is not None:
                        self.parts.metrics.tokens.inc(len(span.token_ids))
                        yield span
            except RequestRefusedError:
                raise
            except EngineError as error:
                if self.rollouts.is_accepting:
                    self.parts.on_engine_failure(error)
                raise

    async def _next(self, spans: AsyncGenerator[TokenSpan, None]) -> TokenSpan | None:
        # Tokens that a slow client holds back are not owed by the engine.
        with self.rollouts.decoding.awaiting():
            return await anext(spans, None)
