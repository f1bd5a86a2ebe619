"""Notices that nothing has arrived for too long although the broker is reachable."""

from __future__ import annotations

from penstock.stall_limits import SilenceLimit, sample_speeds, silence_limit
from services.trainer.run.context import RunContext

LOOK_EVERY_S = 60.0
"""Interval between queries of the generators' speed, once the least limit has passed."""
LONG_CALL_S = 5.0
"""A broker that takes longer to answer counts as having been away."""


class StallWatch:
    """Time without news.

    Args:
        context: The run's.
        setting: Names the option that sets the limit.
        configured_s: Its value, seconds; None derives the limit from the longest completion and the measured speed.
        least_s: The least limit that is derived.
    """

    def __init__(self, context: RunContext, *, setting: str, configured_s: float | None, least_s: float) -> None:
        self._context, self._clock = context, context.clock
        self._setting, self._configured_s, self._least_s = setting, configured_s, least_s
        self.restart()

    def restart(self) -> None:
        """Reset the watch: something arrived, or the broker was away, which shows nothing about the producers."""
        self._since_s = self._clock.monotonic_s()
        self._look_at_s = 0.0

    async def exceeded(self) -> SilenceLimit | None:
        """The limit, once it has passed. Raises PenstockError if the broker refuses for good."""
        now_s = self._clock.monotonic_s()
        quiet_s = now_s - self._since_s
        if quiet_s <= (self._least_s if self._configured_s is None else self._configured_s):
            return None
        if self._configured_s is None and now_s < self._look_at_s:
            return None
        limit = await self._limit()
        if self._clock.monotonic_s() - now_s > LONG_CALL_S:
            self.restart()
            return None
        self._look_at_s = now_s + LOOK_EVERY_S
        return limit if quiet_s > limit.value_s else None

    async def _limit(self) -> SilenceLimit:
        views = []
        if self._configured_s is None:
            views = list((await self._context.client.get_run(self._context.run_id)).generators)
        return silence_limit(
            setting=self._setting,
            configured_s=self._configured_s,
            least_s=self._least_s,
            max_tokens=self._context.config.sampling.max_new_tokens,
            speeds=sample_speeds(views),
        )
