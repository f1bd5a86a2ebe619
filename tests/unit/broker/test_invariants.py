"""Conservation and staleness under any order of events, with generators that update, lag, die and repeat themselves."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.v1 import broker_pb2, types_pb2
from services.broker import delivery, generation, scoring
from services.broker.audit import audit, audit_rows
from services.broker.books import folded
from services.broker.generation import Grant
from services.broker.opening import reopen_run
from services.broker.run_state import RunState
from services.broker.scoring import ScoringGrant
from services.broker.store import Mark, Snapshot
from tests.helpers.broker import limits
from tests.unit.broker.builders import CONSUMER, finish, lease, lease_scoring, open_state, put, score, submit

B, S = 2, 1
LIMITS = {
    "groups_per_step": B,
    "max_staleness": S,
    "group_size": 3,
    "max_leases_per_sample": 4,
    "max_queued_groups": 1000,
}
STATUSES = (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED)


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = open_state(**LIMITS)
        self.now_s = 10.0
        self.num_submitted = 0
        self.grants: list[tuple[Grant, int]] = []
        self.scoring: list[ScoringGrant] = []
        self.held: list[str] = []
        self.counts: dict[str, int] = {}

    @rule(count=st.integers(2, 5))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.num_submitted += 1
            assert submit(self.state, f"g{self.num_submitted}") == []

    @rule(count=st.integers(3, 12), lag=st.sampled_from([0, 0, 0, 1, 2]))
    def lease(self, count: int, lag: int) -> None:
        version = max(0, self.state.run.policy_version - lag)
        grants = lease(self.state, count, version, now_s=self.now_s)
        self.grants += [(grant, version) for grant in grants]

    @precondition(lambda self: self.grants)
    @rule(share=st.integers(1, 3), how=st.sampled_from(["finish", "finish", "finish", "abort", "partly"]))
    def decode(self, share: int, how: str) -> None:
        """Go on with all, half or a third of the leases ever given, oldest first."""
        count = -(-len(self.grants) // share)
        chosen, self.grants = self.grants[:count], self.grants[count:]
        for grant, version in chosen:
            self._decode(grant, version, how)

    def _decode(self, grant: Grant, version: int, how: str) -> None:
        group = self.state.groups.get(grant.sample[0])
        sample = None if group is None else group.samples[grant.sample[1]]
        is_held = sample is not None and sample.state == broker_pb2.SAMPLE_STATE_LEASED
        if sample is None or not is_held or sample.lease_id != grant.lease_id:
            assert put(self.state, grant, [1, 2], offset=grant.num_prefix_tokens + 7) != []
        elif how == "finish":
            finish(self.state, [grant], version)
        else:
            reason = types_pb2.FINISH_REASON_ABORTED if how == "abort" else types_pb2.FINISH_REASON_UNSPECIFIED
            assert put(self.state, grant, [3], version=version, offset=grant.num_prefix_tokens, finish=reason) == []

    @rule()
    def lose_generators(self) -> None:
        self.now_s += 31
        generation.expire(self.state, self.now_s)

    @rule(count=st.integers(4, 16))
    def lease_scoring(self, count: int) -> None:
        self.scoring += lease_scoring(self.state, count, now_s=self.now_s)

    @rule(first=st.sampled_from(STATUSES))
    def score(self, first: types_pb2.ScoreStatus.ValueType) -> None:
        for number, grant in enumerate(self.scoring):
            score(self.state, grant, first if number == 0 else types_pb2.SCORE_STATUS_OK)
        self.scoring = []

    @rule()
    def lose_workers(self) -> None:
        self.now_s += 61
        scoring.expire_scoring(self.state, self.now_s)

    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        self.held += delivery.deliver(self.state, CONSUMER, max_groups=count, target_tokens=0)

    @precondition(lambda self: len(self.held) >= B)
    @rule()
    def step(self) -> None:
        version = self.state.run.policy_version + 1
        receipt = delivery.acknowledge(self.state, CONSUMER.consumer_id, self.held, version, self.now_s)
        assert receipt.max_staleness_seen <= S
        self.held = []

    @rule(
        num_steps=st.integers(1, 3),
        lag=st.integers(0, 1),
        share=st.integers(1, 2),
        status=st.sampled_from(STATUSES),
    )
    def work_on(self, num_steps: int, lag: int, share: int, status: types_pb2.ScoreStatus.ValueType) -> None:
        """Without such stretches a random walk rarely gets a group as far as the trainer."""
        for _ in range(num_steps):
            self.submit(3)
            self.lease(12, lag)
            self.decode(share, "finish")
            self.lease_scoring(99)
            self.score(status)
            self.deliver(B)
            if len(self.held) >= B:
                self.step()

    @rule()
    def lose_trainer(self) -> None:
        delivery.attach(self.state, CONSUMER, held=())
        self.held = []

    @precondition(lambda self: self.state.run.policy_version >= 1)
    @rule()
    def rewind(self) -> None:
        version = self.state.run.policy_version - 1
        request = broker_pb2.OpenRunRequest(run_id="run-1", limits=limits(**LIMITS), policy_version=version)
        reopen_run(self.state, request, self.now_s)
        delivery.attach(self.state, CONSUMER, held=())
        self.held = []

    @rule()
    def restart_the_broker(self) -> None:
        self.counts = self._stored_counts()
        delta = self.state.delta()
        groups: dict[str, bytes | None] = {name: group.SerializeToString() for name, group in self.state.groups.items()}
        again = RunState()
        again.apply(Snapshot(mark=Mark(1, "m"), is_full=True, run=delta.run, groups=groups))
        assert list(again.queue) == list(self.state.queue)
        assert list(again.finished) == list(self.state.finished)
        assert again.ready == self.state.ready
        assert again.versions == self.state.versions
        assert again.generation_leases == self.state.generation_leases
        self.state = again

    def _stored_counts(self) -> dict[str, int]:
        """The counters of the books as a store would hold them after the next commit."""
        pending = self.state.pending
        counts = {name: self.counts.get(name, 0) + pending.counts.get(name, 0) for name in self.counts | pending.counts}
        return counts if pending.fold_version is None else folded(counts, pending.fold_version)

    @invariant()
    def books_balance(self) -> None:
        books = audit_rows(self.state, self._stored_counts())
        assert books.balanced, books
        assert books.submitted == 3 * self.num_submitted

    @invariant()
    def nothing_stale_is_trained_or_shed(self) -> None:
        books = audit(self.state)
        assert books.max_staleness_seen <= S
        assert "stale" not in books.dropped

    @invariant()
    def a_step_never_overflows(self) -> None:
        assert len(self.state.delivered[types_pb2.PURPOSE_TRAIN]) <= B


TestBroker = BrokerMachine.TestCase
TestBroker.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
)
