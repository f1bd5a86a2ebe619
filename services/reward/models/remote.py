"""A reward model behind gRPC, in any language: any server of `penstock.v1.RewardService`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.errors import (
    BadCertificateError,
    BadTokenError,
    DeadlineError,
    InternalError,
    NotOfferedError,
    PenstockError,
    ServiceUnavailableError,
)
from penstock.network.rpc import call, open_channel
from penstock.rewards import ModelAwayError
from penstock.rewards.model import DEFAULT_MAX_BATCH_SIZE
from penstock.rewards.outcomes import MAX_MESSAGE_CHARACTERS, MAX_NAME_CHARACTERS
from penstock.rewards.score_messages import CREDENTIALS_HINT, THIRD_PARTY, check_score, failed_score
from penstock.security import NO_SECURITY, Security
from penstock.v1 import reward_pb2, reward_pb2_grpc, types_pb2
from penstock.wire.pieces import batched

PROBE_TIMEOUT_S = 5.0
# Far below the 4 MiB that gRPC servers accept by default.
MAX_REQUEST_BYTES = 1024 * 1024


class RemoteModel:
    """Calls a RewardService. Every probe asks for its limits and preferences, since it may have been replaced."""

    def __init__(self, address: str, *, security: Security = NO_SECURITY) -> None:
        """`address` is grpc://host:port; `security` a third party's, never the cluster's own."""
        self._address = address
        self._channel = open_channel(address.removeprefix(THIRD_PARTY), security)
        self._stub = reward_pb2_grpc.RewardServiceStub(self._channel)
        self._description: reward_pb2.GetRewardModelResponse | None = None

    @property
    def name(self) -> str:
        """The name it gave itself, once known, else its address."""
        return (self._description.name if self._description is not None else "") or self._address

    async def check(self) -> str:
        """Nothing: servers may start later."""
        return ""

    async def probe(self) -> None:
        """Ask it to describe itself. Raises ModelAwayError if it is away or refuses the connection."""
        request = reward_pb2.GetRewardModelRequest()
        try:
            self._description = await call(
                self._stub.GetRewardModel, request, peer=self._address, timeout_s=PROBE_TIMEOUT_S
            )
        except NotOfferedError:
            # The contract allows a model not to describe itself; then it has the defaults.
            self._description = reward_pb2.GetRewardModelResponse()
        except (BadTokenError, BadCertificateError) as error:
            raise ModelAwayError(f"reward model {error}; {CREDENTIALS_HINT}") from error
        except (ServiceUnavailableError, DeadlineError) as error:
            raise ModelAwayError(f"reward model {error}") from error
        except PenstockError:
            # It answered, if only with an error of its own: it is there.
            self._description = reward_pb2.GetRewardModelResponse()

    async def describe(self) -> reward_pb2.GetRewardModelResponse:
        """Its own description at the last probe."""
        if self._description is None:
            await self.probe()
        assert self._description is not None
        return self._description

    async def score(self, items: Sequence[reward_pb2.ScoreItem], *, timeout_s: float) -> list[types_pb2.Score]:
        """One score per item, in order; malformed answers become FAILED. Raises PenstockError and ModelAwayError."""
        description = await self.describe()
        limit = description.max_batch_size or DEFAULT_MAX_BATCH_SIZE
        scores: list[types_pb2.Score] = []
        for part in _split(items, max_items=limit, wants_token_ids=description.wants_token_ids):
            scores += await self._score_part(part, timeout_s)
        return scores

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def _score_part(self, items: list[reward_pb2.ScoreItem], timeout_s: float) -> list[types_pb2.Score]:
        request = reward_pb2.ScoreRequest(items=items)
        try:
            response = await call(self._stub.Score, request, peer=self._address, timeout_s=timeout_s)
        except (NotOfferedError, BadTokenError) as error:
            # Not a reward model, or not for us: not the samples' fault, and an operator has to fix it.
            raise ModelAwayError(f"reward model {error}") from error
        if len(response.scores) != len(items):
            raise InternalError(f"{self._address} answered {len(response.scores)} scores for {len(items)} items")
        return [self._checked(score) for score in response.scores]

    def _checked(self, score: types_pb2.Score) -> types_pb2.Score:
        problem = check_score(score)
        if problem is not None:
            return failed_score(f"malformed score: {problem}", model=self.name)
        score.message = score.message[:MAX_MESSAGE_CHARACTERS]
        score.model = score.model[:MAX_NAME_CHARACTERS]
        return score


def _split(
    items: Sequence[reward_pb2.ScoreItem], *, max_items: int, wants_token_ids: bool
) -> Iterator[list[reward_pb2.ScoreItem]]:
    sent = (item if wants_token_ids or not item.token_ids else _without_token_ids(item) for item in items)
    return batched(sent, reward_pb2.ScoreItem.ByteSize, MAX_REQUEST_BYTES, most_items=max_items)


def _without_token_ids(item: reward_pb2.ScoreItem) -> reward_pb2.ScoreItem:
    copy = reward_pb2.ScoreItem()
    copy.CopyFrom(item)
    copy.ClearField("token_ids")
    return copy
