"""Appends a sample's turns, and what its environment gave between them, to the stream that goes to the broker.

Promise: where routes are recorded, each token comes with the row of the token before it, as any sample's does. Only the
engine knows the rows of given tokens, and only once it reads them: with the first tokens of the turn that follows.
Until then they wait here; of a generator that dies meanwhile nothing is stored, and the next one gives them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.clients.sample_stream import SampleStream
from penstock.wire.codec import Int32
from penstock.wire.routes import Routes
from services.generator.engine.engine import TokenSpan


class TurnTokens:
    """The tokens of one sample.

    Args:
        stream: Where they go.
        has_routes: Whether its spans come with routes.
    """

    def __init__(self, stream: SampleStream, *, has_routes: bool) -> None:
        self._stream = stream
        self._has_routes = has_routes
        self._given: Int32 = np.empty(0, np.int32)
        self._given_version = 0

    def give(self, token_ids: Sequence[int], *, policy_version: int) -> None:
        """Append tokens that were not sampled, before a turn."""
        self._given, self._given_version = np.asarray(token_ids, np.int32), policy_version
        if not self._has_routes:
            self._append_given(None)

    def append(self, span: TokenSpan) -> None:
        """Append tokens of a turn; its first ones bring rows of all that the engine read before them."""
        routes, num_sampled = span.routes, len(span.token_ids)
        if routes is not None and num_sampled:
            # Tokens that are stored have their rows; before a sample's first ones come those of the prompt.
            if self._stream.num_tokens:
                routes = routes[-(len(self._given) + num_sampled) :]
            if len(self._given):
                self._append_given(routes[:-num_sampled])
                routes = routes[-num_sampled:]
        self._stream.append(span.token_ids, span.logprobs, policy_version=span.policy_version, routes=routes)

    def _append_given(self, routes: Routes | None) -> None:
        given, self._given = self._given, self._given[:0]
        no_logprobs = np.zeros(len(given), np.float32)
        self._stream.append(given, no_logprobs, policy_version=self._given_version, routes=routes, is_sampled=False)
