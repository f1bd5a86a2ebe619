"""What the clients know to be true, whatever the broker says: which tokens and scores it acknowledged.

Every decoded token has a serial number of its own, which is also its token id: so a token that was decoded twice, lost,
or put in another place shows. Where an answer was lost nobody knows whether the broker stored the message; then several
contents are possible until the broker shows one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.v1 import types_pb2
from penstock.wire.codec import decode_versions, encode_versions, float32_array, float32_bytes, int32_array, int32_bytes
from tests.helpers.broker_model.session_ledger import SessionLedger

Attempt = tuple[str, int, int]
"""Group id, sample index, attempt."""


@dataclass(frozen=True, slots=True)
class Token:
    """One decoded token."""

    serial: int
    version: int

    @property
    def logprob(self) -> float:
        """Some log-probability that no neighbour has."""
        return -(self.serial % 4096) / 64


Content = tuple[Token, ...]


def attempt_of(key: types_pb2.SampleKey) -> Attempt:
    """The sample a key names."""
    return (key.group_id, key.sample_index, key.attempt)


def arrays_of(tokens: Content) -> tuple[bytes, bytes, types_pb2.VersionRuns]:
    """Token ids, log-probs and versions as they cross the wire."""
    return (
        int32_bytes([token.serial for token in tokens]),
        float32_bytes([token.logprob for token in tokens]),
        encode_versions([token.version for token in tokens]),
    )


def reference_of(serials: Iterable[int]) -> bytes:
    """A scorer's log-probs of tokens, which no neighbour has."""
    return float32_bytes([-(serial % 2048) / 32 for serial in serials])


def chunk_of(
    lease_id: str,
    key: types_pb2.SampleKey,
    offset: int,
    tokens: Content,
    finish: types_pb2.FinishReason.ValueType,
) -> types_pb2.TokenChunk:
    """Tokens as a generator sends them."""
    token_ids, logprobs, versions = arrays_of(tokens)
    return types_pb2.TokenChunk(
        key=key,
        lease_id=lease_id,
        offset=offset,
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=versions,
        finish_reason=finish,
        text="done" if finish else "",
    )


def tokens_of(chunk: types_pb2.TokenChunk) -> Content:
    """The tokens of a chunk this test sent."""
    serials = int32_array(chunk.token_ids, "token_ids")
    versions = decode_versions(chunk.policy_versions, num_tokens=serials.size, field="policy_versions")
    return tuple(Token(int(serial), int(version)) for serial, version in zip(serials, versions, strict=True))


def tokens_trained_on(trajectory: types_pb2.Trajectory) -> Content:
    """A trajectory's tokens; checks that its arrays belong together."""
    serials = int32_array(trajectory.token_ids, "token_ids")
    versions = decode_versions(trajectory.policy_versions, num_tokens=serials.size, field="policy_versions")
    tokens = tuple(Token(int(serial), int(version)) for serial, version in zip(serials, versions, strict=True))
    assert list(float32_array(trajectory.behavior_logprobs, "logprobs")) == [token.logprob for token in tokens]
    if tokens:
        assert trajectory.min_policy_version == min(token.version for token in tokens)
        assert trajectory.max_policy_version == max(token.version for token in tokens)
    return tokens


@dataclass(slots=True)
class Truth:
    """See the module."""

    submitted: dict[str, int] = field(default_factory=dict)
    """Samples of every training group that the broker accepted."""
    possible: dict[Attempt, set[Content]] = field(default_factory=dict)
    """What may be stored of a sample; one content where nothing is unsure."""
    scores: dict[Attempt, set[float]] = field(default_factory=dict)
    """Scores that may be stored."""
    put: dict[str, types_pb2.TrajectoryGroup] = field(default_factory=dict)
    """Groups that came finished, as they were sent."""
    sessions: SessionLedger = field(default_factory=SessionLedger)
    """Agents' sessions."""

    def sent(self, sample: Attempt, offset: int, tokens: Content) -> None:
        """These tokens are on their way: from now on they may be stored."""
        contents = self._contents(sample)
        self.possible[sample] = contents | {content + tokens for content in contents if len(content) == offset}

    def accepted(self, sample: Attempt, offset: int, tokens: Content) -> None:
        """The broker says that it has these tokens: stored now, or known already."""
        end = offset + len(tokens)
        found = {content for content in self._contents(sample) if content[offset:end] == tokens}
        assert found, f"{sample}: the broker took tokens at {offset}, but knows {self._contents(sample)}"
        self.possible[sample] = found

    def refused(self, sample: Attempt, offset: int, tokens: Content) -> None:
        """The broker says that it does not have these tokens."""
        end = offset + len(tokens)
        found = {content for content in self._contents(sample) if not tokens or content[offset:end] != tokens}
        assert found, f"{sample}: the broker refused tokens at {offset}, but has shown them"
        self.possible[sample] = found

    def shown(self, sample: Attempt, serials: list[int]) -> None:
        """The broker shows the tokens it has: no token twice, none lost."""
        found = {content for content in self._contents(sample) if [token.serial for token in content] == serials}
        assert found, f"{sample}: the broker shows tokens {serials}, it was given {self._contents(sample)}"
        self.possible[sample] = found

    def forget_future(self, policy_version: int) -> None:
        """The run went back: tokens of later versions, and what they were put on top of, are thrown away."""
        for sample, contents in self.possible.items():
            self.possible[sample] = {
                () if any(token.version > policy_version for token in content) else content for content in contents
            }

    def _contents(self, sample: Attempt) -> set[Content]:
        return self.possible.get(sample, {()})


class Serials:
    """Numbers for tokens and scores, each once."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def next(self) -> int:
        """The next number."""
        return next(self._numbers)
