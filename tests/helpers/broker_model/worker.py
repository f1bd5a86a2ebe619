"""A reward worker of the model, or a scorer."""

from __future__ import annotations

from penstock.v1 import broker_pb2, types_pb2
from tests.helpers.broker_model.truth import attempt_of, reference_of
from tests.helpers.broker_model.world import MAX_TRIES, RUN, Link, World, settle

_OK = types_pb2.SCORE_STATUS_OK


class ModelWorker:
    """Leases finished samples and scores each with a number of its own; a scorer gives each token its log-prob."""

    def __init__(self, world: World, number: int, *, is_scorer: bool = False) -> None:
        self.world, self.number = world, number
        self._task = broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS if is_scorer else broker_pb2.SCORING_TASK_REWARD
        self.held: dict[str, broker_pb2.ScoringLease] = {}
        self.sent: list[broker_pb2.ScoreResult] = []
        self._life = 0
        self._credit = self._num_leases = 0
        self._receipts: set[str] = set()
        self._link = Link(world, "StreamScoring", self._on_response, at=number)

    def ask(self, slots: int) -> None:
        """Ask for as many leases as make `slots`; renews those held."""
        self._connect()
        self._credit = max(self._credit, self._num_leases + slots - len(self.held), 1)
        request = broker_pb2.StreamScoringRequest(credit_total=self._credit, active_lease_ids=list(self.held))
        self._link.send(request)

    def _connect(self) -> None:
        if not self._link.is_open:
            self._credit = self._num_leases = 0
            worker_id = f"worker-{self.number}-{self._life}"
            hello = broker_pb2.RewardHello(run_id=RUN, worker_id=worker_id, task=self._task)
            self._link.open(broker_pb2.StreamScoringRequest(hello=hello))

    def _on_response(self, response: broker_pb2.StreamScoringResponse) -> None:
        self._num_leases += len(response.leases)
        assert self._num_leases <= self._credit, "more leases than credits"
        for lease in response.leases:
            serials = memoryview(lease.item.token_ids).cast("i").tolist()
            self.world.truth.shown(attempt_of(lease.item.key), serials)
            self.held[lease.lease_id] = lease
        self._receipts.update(response.accepted_lease_ids)
        self._receipts.update(response.lost_lease_ids)

    def judge(
        self, lease_id: str, status: types_pb2.ScoreStatus.ValueType = _OK, *, is_equal: bool = False
    ) -> broker_pb2.ScoreResult:
        """A verdict on a lease held: a value of its own, or the same for all."""
        lease = self.held.pop(lease_id)
        if self._task == broker_pb2.SCORING_TASK_REFERENCE_LOGPROBS and status == _OK:
            return broker_pb2.ScoreResult(
                lease_id=lease_id,
                key=lease.item.key,
                reference_logprobs=reference_of(memoryview(lease.item.token_ids).cast("i").tolist()),
            )
        value = (1.0 if is_equal else float(self.world.serials.next())) if status == _OK else None
        score = types_pb2.Score(status=status, value=value)
        result = broker_pb2.ScoreResult(lease_id=lease_id, key=lease.item.key, score=score)
        if value is not None:
            # The first stored score counts: of the values ever sent for a sample any one may be it, and no other.
            self.world.truth.scores.setdefault(attempt_of(lease.item.key), set()).add(value)
        return result

    async def report(self, *results: broker_pb2.ScoreResult) -> None:
        """Send results until each has its receipt."""
        self.sent = [*self.sent, *results][-32:]
        wanted = {result.lease_id for result in results}
        for _ in range(MAX_TRIES):
            self._connect()
            self._receipts.clear()
            self._link.send(broker_pb2.StreamScoringRequest(results=results))
            await settle()
            if wanted <= self._receipts:
                return
            error = self._link.error()
            if error is not None:
                raise error
        raise AssertionError(f"no receipt for scores {wanted - self._receipts}")

    async def reconnect(self) -> None:
        """The connection was lost."""
        await self._link.close()

    async def die(self) -> None:
        """Crash."""
        await self.reconnect()
        self.held.clear()
        self._life += 1
