"""What becomes of a call that an environment answers with an error: tried again, waited for, or the sample's end.

The rule is that of reward workers, whose count of errors it shares: a few are the samples' bad luck, many say that the
environment is broken, and then no sample ends for it.

    works --(errors above `max_error_share` of the last answers)--> broken: one call at a time --(an answer)--> works

Promises:

- While the environment is broken no sample is dropped for it; who waits for what is in `notice`.
- A sample waits OUTAGE_TIMEOUT_S at most, then it is given back.
- Errors that concern the sample alone, such as a task that cannot be played, are neither repeated nor counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from penstock.errors import ServiceUnavailableError
from penstock.network.outage import Outage
from penstock.network.rpc import backoff_s
from penstock.rewards.grader_errors import GraderErrors, is_grader_error, may_pass
from penstock.v1 import types_pb2

OUTAGE_TIMEOUT_S = 600.0
"""How long samples wait for an environment that is away, full or broken; then they are given back. A lease under which
no token comes ends after some minutes in any case (`trainer.max_lease_silence_s`), and another one begins."""

_OK = types_pb2.Score(status=types_pb2.SCORE_STATUS_OK)
_Answer = TypeVar("_Answer")


class EnvironmentFaultError(Exception):
    """A sample cannot go on, and gets no reward: by `status`, the environment's fault and named as such."""

    def __init__(self, message: str, *, status: types_pb2.ScoreStatus.ValueType, is_of_sample: bool = False) -> None:
        """`is_of_sample` if other samples are not concerned."""
        super().__init__(message)
        self.status = status
        self.is_of_sample = is_of_sample


class EnvironmentAwayError(Exception):
    """The environment was away, full or broken for as long as samples wait: nothing is the sample's fault."""


class ErrorPolicy:
    """One environment's errors, as a generator's samples meet them.

    Args:
        peer: The environment, in messages.
        max_retries: Further attempts of a call while the environment is not broken.
        max_error_share: Above this share of errors among the last answers it is.
    """

    def __init__(self, peer: str, *, max_retries: int, max_error_share: float) -> None:
        self.notice = ""
        """A line to show while samples wait for an environment that is broken; empty while they do not."""
        self._max_retries = max_retries
        self._errors = GraderErrors(max_share=max_error_share)
        self._turn = asyncio.Lock()
        self._outage = Outage(peer, on_notice=self._note)

    def _note(self, text: str) -> None:
        self.notice = text

    async def carry_out(self, work: Callable[[bool], Awaitable[_Answer]]) -> _Answer:
        """What `work` returns, called again after errors; its argument says whether it is.

        Raises EnvironmentFaultError, EnvironmentAwayError and what else `work` raises.
        """
        until_s = asyncio.get_running_loop().time() + OUTAGE_TIMEOUT_S
        num_tries = 0
        for delay_s in backoff_s():
            async with self._permit(until_s):
                try:
                    answer = await work(num_tries > 0)
                except EnvironmentFaultError as error:
                    self._judge(error, is_new=not num_tries, may_repeat=num_tries < self._max_retries)
                    num_tries += 1
                else:
                    self._errors.broken_by([_OK], are_new=not num_tries)
                    self._outage.answered()
                    return answer
            await asyncio.sleep(delay_s)
        raise AssertionError("unreachable: backoff_s never ends")

    def _judge(self, error: EnvironmentFaultError, *, is_new: bool, may_repeat: bool) -> None:
        """Count an error; raises it if the sample ends with it."""
        score = types_pb2.Score(status=error.status, message=str(error))
        if error.is_of_sample or not is_grader_error(score):
            raise error
        if broken := self._errors.broken_by([score], are_new=is_new):
            self._outage.failed(ServiceUnavailableError(broken))
        elif not (may_repeat and may_pass(score)):
            raise error

    def _away(self) -> EnvironmentAwayError:
        return EnvironmentAwayError(self.notice or "the environment answers with errors")

    @asynccontextmanager
    async def _permit(self, until_s: float) -> AsyncIterator[None]:
        """Inside, one call may be tried. Raises EnvironmentAwayError if that is not so by then, in the loop's time."""
        while self._errors.is_broken:
            try:
                async with asyncio.timeout_at(until_s):
                    await self._turn.acquire()
            except TimeoutError:
                raise self._away() from None
            try:
                # A turn that is free is taken even after its time.
                if self._errors.is_broken and asyncio.get_running_loop().time() >= until_s:
                    raise self._away()
                if self._errors.is_broken:
                    yield
                    return
            finally:
                self._turn.release()
        yield
