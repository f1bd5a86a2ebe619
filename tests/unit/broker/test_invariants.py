"""Conservation and staleness under any order of events, with generators that update, lag, die and repeat themselves."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.v1 import broker_pb2, types_pb2
from services.broker import delivery, generation, scoring
from services.broker.audit import audit
from services.broker.dispatch import FirstComeFirstServed
from services.broker.generation import Grant
from services.broker.opening import reopen_run
from services.broker.run_state import RunState
from services.broker.scoring import ScoringGrant
from services.broker.store import Snapshot, Mark
from tests.helpers.broker import limits
from tests.unit.broker.builders import CONSUMER, finish, lease, lease_scoring, open_state, put, score, submit

B, S = 2, 1
STATUSES = (types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_OK, types_pb2.SCORE_STATUS_FAILED)


class BrokerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = open_state(groups_per_step=B, max_staleness=S, group_size=3, max_leases_per_sample=4)
        self.now_s = 10.0
        self.num_submitted = 0
        self.grants: list[tuple[Grant, int]] = []
        self.scoring: list[ScoringGrant] = []
        self.held: list[str] = []

    @rule(count=st.integers(1, 4))
    def submit(self, count: int) -> None:
        for _ in range(count):
            self.num_submitted += 1
            assert submit(self.state, f"g{self.num_submitted}") == []

    @rule(count=st.integers(1, 7), lag=st.integers(0, 2))
    def lease(self, count: int, lag: int) -> None:
        version = max(0, self.state.run.policy_version - lag)
        grants = lease(self.state, count, version, now_s=self.now_s)
        self.grants += [(grant, version) for grant in grants]

    @precondition(lambda self: self.grants)
    @rule(data=st.data(), how=st.sampled_from(["finish", "finish", "abort", "partly"]))
    def decode(self, data: st.DataObject, how: str) -> None:
        grant, version = self.grants.pop(data.draw(st.integers(0, len(self.grants) - 1)))
        group = self.state.groups.get(grant.sample[0])
        if group is None or group.samples[grant.sample[1]].lease_id != grant.lease_id:
            assert put(self.state, grant, [1], version=0, offset=grant.num_prefix_tokens) != []
        elif group.samples[grant.sample[1]].state == broker_pb2.SAMPLE_STATE_LEASED:
            if how == "finish":
                finish(self.state, [grant], version)
            else:
                reason = types_pb2.FINISH_REASON_ABORTED if how == "abort" else types_pb2.FINISH_REASON_UNSPECIFIED
                errors = put(self.state, grant, [3], version=version, offset=grant.num_prefix_tokens, finish=reason)
                assert errors == []

    @rule()
    def lose_generators(self) -> None:
        self.now_s += 31
        generation.expire(self.state, self.now_s)

    @rule(count=st.integers(1, 6))
    def lease_scoring(self, count: int) -> None:
        self.scoring += lease_scoring(self.state, count, now_s=self.now_s)

    @precondition(lambda self: self.scoring)
    @rule(status=st.sampled_from(STATUSES))
    def score(self, status: types_pb2.ScoreStatus.ValueType) -> None:
        score(self.state, self.scoring.pop(), status)

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

    @rule()
    def lose_trainer(self) -> None:
        delivery.attach(self.state, CONSUMER, held=())
        self.held = []

    @precondition(lambda self: self.state.run.policy_version >= 1)
    @rule()
    def rewind(self) -> None:
        version = self.state.run.policy_version - 1
        shape = limits(groups_per_step=B, max_staleness=S, group_size=3, max_leases_per_sample=4)
        request = broker_pb2.OpenRunRequest(run_id="run-1", limits=shape, policy_version=version)
        reopen_run(self.state, request, self.now_s)
        delivery.attach(self.state, CONSUMER, held=())
        self.held = []

    @rule()
    def restart_the_broker(self) -> None:
        delta = self.state.delta()
        groups: dict[str, bytes | None] = {
            name: group.SerializeToString() for name, group in self.state.groups.items()
        }
        again = RunState(FirstComeFirstServed())
        again.apply(Snapshot(mark=Mark(1, "m"), is_full=True, run=delta.run, groups=groups))
        assert list(again.queue) == list(self.state.queue)
        assert list(again.finished) == list(self.state.finished)
        assert again.ready == self.state.ready
        assert again.versions == self.state.versions
        assert again.generation_leases == self.state.generation_leases
        self.state = again

    @invariant()
    def books_balance(self) -> None:
        books = audit(self.state)
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
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
