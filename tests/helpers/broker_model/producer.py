"""A producer of the model: puts groups that were made elsewhere."""

from __future__ import annotations

from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import int32_bytes
from tests.helpers.broker_model.truth import Token, arrays_of
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Link, World, settle

MAX_HOLDS = 60
"""A broker without room holds a request back for some seconds before it refuses it."""


class ModelProducer:
    """Puts one request at a time and waits for its answer; sends it again where none came."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.num_puts = 0
        self.sent: list[broker_pb2.PutTrajectoriesRequest] = []
        self._answers: dict[str, broker_pb2.PutTrajectoriesResponse] = {}
        self._link = Link(world, "PutTrajectories", self._on_response)

    def make(self, num_groups: int, version: int, *, is_equal: bool) -> broker_pb2.PutTrajectoriesRequest:
        """A request of new groups, their tokens sampled by a version."""
        self.num_puts += 1
        groups = [self._group(f"p{self.num_puts}.{number}", version, is_equal) for number in range(num_groups)]
        return broker_pb2.PutTrajectoriesRequest(
            run_id=RUN,
            producer_id="producer",
            put_id=f"put-{self.num_puts}",
            groups=types_pb2.TrajectoryGroups(groups=groups).SerializeToString(),
        )

    def _group(self, group_id: str, version: int, is_equal: bool) -> types_pb2.TrajectoryGroup:
        return types_pb2.TrajectoryGroup(
            prompt=types_pb2.Prompt(
                group_id=group_id,
                token_ids=int32_bytes([1, 2]),
                group_size=self.world.limits.group_size,
                purpose=types_pb2.PURPOSE_TRAIN,
            ),
            trajectories=[
                self._trajectory(types_pb2.SampleKey(group_id=group_id, sample_index=index), version, is_equal)
                for index in range(self.world.limits.group_size)
            ],
            min_policy_version=version,
        )

    def _trajectory(self, key: types_pb2.SampleKey, version: int, is_equal: bool) -> types_pb2.Trajectory:
        tokens = tuple(Token(self.world.serials.next(), version) for _ in range(2))
        token_ids, logprobs, versions = arrays_of(tokens)
        value = 1.0 if is_equal else float(self.world.serials.next())
        return types_pb2.Trajectory(
            key=key,
            num_leases=1,
            token_ids=token_ids,
            behavior_logprobs=logprobs,
            policy_versions=versions,
            finish_reason=types_pb2.FINISH_REASON_STOP,
            score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=value),
            min_policy_version=version,
            max_policy_version=version,
        )

    async def put(self, request: broker_pb2.PutTrajectoriesRequest) -> broker_pb2.PutTrajectoriesResponse:
        """Send a request until it is answered; groups that the broker took are noted."""
        self.sent = [*self.sent, request][-8:]
        groups = types_pb2.TrajectoryGroups.FromString(request.groups).groups
        for group in groups:
            # From now on they may be stored, whether or not an answer comes.
            self.world.truth.put.setdefault(group.prompt.group_id, group)
        response = await self._answer(request)
        refused = {error.index for error in response.errors}
        if not response.HasField("retry_delay"):
            for index, group in enumerate(groups):
                if index not in refused:
                    self.world.truth.submitted.setdefault(group.prompt.group_id, len(group.trajectories))
        return response

    async def _answer(self, request: broker_pb2.PutTrajectoriesRequest) -> broker_pb2.PutTrajectoriesResponse:
        self._answers.clear()
        # The broker reads this method's requests itself.
        sent = request.SerializeToString()
        for _ in range(MAX_TRIES):
            if self._link.is_open:
                self._link.send(sent)
            else:
                self._link.open(sent)
            for _ in range(MAX_HOLDS):
                await settle()
                if request.put_id in self._answers:
                    return self._answers[request.put_id]
                if not self._link.is_open:
                    break
            error = self._link.error()
            if error is not None:
                raise error
        raise AssertionError("no answer to a put")

    def _on_response(self, response: broker_pb2.PutTrajectoriesResponse) -> None:
        self._answers[response.put_id] = response

    async def reconnect(self) -> None:
        """The connection was lost."""
        await self._link.close()
