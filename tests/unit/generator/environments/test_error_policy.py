"""What becomes of an environment's errors in a generator: repeated, waited for, or the sample's end."""

import asyncio

import pytest

from penstock.v1 import types_pb2
from services.generator.environments import error_policy
from services.generator.environments.error_policy import EnvironmentAwayError, EnvironmentFaultError, ErrorPolicy
from tests.helpers.waiting import until

FAILED, TIMEOUT = types_pb2.SCORE_STATUS_FAILED, types_pb2.SCORE_STATUS_TIMEOUT


class Calls:
    """Answers with the errors of a list, one a call, then well."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.again = []

    async def __call__(self, is_again):
        self.again.append(is_again)
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def fault(status=FAILED, **more):
    return EnvironmentFaultError("no", status=status, **more)


def policy(**changes):
    return ErrorPolicy("environment e:1", **{"max_retries": 2, "max_error_share": 0.2} | changes)


async def test_a_few_errors_are_repeated_and_then_end_the_sample():
    errors = policy()
    passing, failing = Calls(fault(), fault()), Calls(*[fault()] * 3)
    assert await errors.carry_out(passing) == "answer"
    assert passing.again == [False, True, True]
    with pytest.raises(EnvironmentFaultError):
        await errors.carry_out(failing)
    assert failing.errors == []


@pytest.mark.parametrize("error", [fault(TIMEOUT), fault(types_pb2.SCORE_STATUS_ENVIRONMENT_DIVERGED)])
async def test_what_would_end_the_same_way_is_not_repeated(error):
    calls = Calls(error)
    with pytest.raises(EnvironmentFaultError):
        await policy().carry_out(calls)
    assert calls.again == [False]


async def test_tasks_that_cannot_be_played_never_break_an_environment():
    errors = policy(max_error_share=0.0)
    for _ in range(20):
        with pytest.raises(EnvironmentFaultError):
            await errors.carry_out(Calls(fault(is_of_sample=True)))
    assert await errors.carry_out(Calls()) == "answer"


async def test_above_the_share_calls_wait_for_each_other_and_none_is_given_up():
    errors, running, most, num_repeated = policy(max_retries=0), 0, 0, 0
    is_mended = asyncio.Event()

    async def work(is_again):
        nonlocal running, most, num_repeated
        running, num_repeated = running + 1, num_repeated + is_again
        most = max(most, running if is_again else 0)
        await asyncio.sleep(0)
        running -= 1
        if not is_mended.is_set():
            raise fault(TIMEOUT)
        return "answer"

    # Fifteen answers say nothing yet: a sample that fails by then is given up.
    for _ in range(15):
        with pytest.raises(EnvironmentFaultError):
            await errors.carry_out(work)
    waiting = [asyncio.create_task(errors.carry_out(work)) for _ in range(8)]
    await until(lambda: num_repeated >= 8)
    assert not any(task.done() for task in waiting)
    assert most == 1
    is_mended.set()
    assert await asyncio.gather(*waiting) == ["answer"] * 8


@pytest.mark.parametrize("num_waiting", [1, 3])
async def test_samples_that_waited_long_are_given_back(monkeypatch, num_waiting):
    monkeypatch.setattr(error_policy, "OUTAGE_TIMEOUT_S", 0.3)
    errors = policy(max_retries=0)
    for _ in range(16):
        with pytest.raises((EnvironmentFaultError, EnvironmentAwayError)):
            await errors.carry_out(Calls(*[fault()] * 100))
    waiting = [errors.carry_out(Calls(*[fault()] * 100)) for _ in range(num_waiting)]
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(error) for error in found} == {EnvironmentAwayError}
