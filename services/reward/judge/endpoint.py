"""Calls an OpenAI-compatible endpoint: one answer for one request, with deadlines, retries and bounds.

Three things can go wrong, each with its own error:
- ModelAwayError: nothing is judged at present (unreachable, overloaded, or it refuses the key, the model, the address);
  JudgeRefusesError is the kind that waiting does not mend;
- UnusableAnswerError: this request got no answer that can be used;
- TimeoutError: its deadline passed.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from penstock.network.rpc import backoff_s
from penstock.rewards import ModelAwayError
from penstock.rewards.outcomes import clean_text
from penstock.secret import read_secret
from penstock.security import NO_SECURITY, Security
from penstock.security.plain_text import is_local
from penstock.tracing.context import headers
from services.reward.judge.answer_cache import Answer
from services.reward.judge.config import JudgeConfig
from services.reward.judge.metrics import COST, REQUEST_SECONDS, REQUESTS, TOKENS
from services.reward.judge.pace import Pace
from services.reward.judge.responses import read_answer, read_error, read_usage
from services.reward.judge.verdicts import UnusableAnswerError

PROBE_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 4
"""Requests for one answer, where earlier ones failed in a way that may pass."""
MAX_RESPONSE_BYTES = 256 * 1024
MOST_HELD_S = 600.0
"""Longest that an endpoint is waited for before it is asked again, whatever its Retry-After says."""
_REFUSALS = {
    401: "refuses the key: set {key} to a valid one",
    403: "forbids the request: check the key in {key} and what it opens",
    404: "does not know the address or the model: check reward.judge.url and reward.judge.model ({model})",
    405: "takes no such request: check reward.judge.url",
    301: "answers from elsewhere: check reward.judge.url",
    302: "answers from elsewhere: check reward.judge.url",
    307: "answers from elsewhere: check reward.judge.url",
    308: "answers from elsewhere: check reward.judge.url",
}
_OVERLOADED = frozenset({429, 502, 503, 504})
_MAY_PASS = frozenset({408, 409, 425, 500}) | _OVERLOADED
_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class JudgeRefusesError(ModelAwayError):
    """The endpoint refuses every request until someone changes key, model or address."""


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes
    retry_after_s: float | None


class Endpoint:
    """One judge's endpoint."""

    def __init__(self, config: JudgeConfig, *, security: Security = NO_SECURITY) -> None:
        """`security` has the authority and certificate for TLS, if any. Raises ConfigError: the key cannot be read."""
        self._config = config
        self._key = read_secret(config.key_variable) or ""
        self._pace = Pace(max_concurrent=config.max_concurrent, per_second=config.requests_per_second)
        self._client = httpx2.AsyncClient(
            verify=_tls(security),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx2.Limits(
                max_connections=config.max_concurrent, max_keepalive_connections=config.max_concurrent
            ),
            # Loopback is never behind a proxy.
            trust_env=not is_local(_host_port(config.url)),
        )

    @property
    def shows_key_in_plain(self) -> bool:
        """Whether others on the way could read the key."""
        return bool(self._key) and self._config.url.startswith("http://") and not is_local(_host_port(self._config.url))

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def probe(self) -> None:
        """Return when it answers at all, within seconds; raises ModelAwayError. Costs nothing: no model runs."""
        self._check_held()
        try:
            response = await self._send("GET", "/models", None, timeout_s=PROBE_TIMEOUT_S)
        except (httpx2.HTTPError, TimeoutError) as error:
            raise ModelAwayError(f"judge {self._config.url}: {_described(error)}") from error
        if response.status in (401, 403):
            raise self._refusal(response)
        if response.status in _OVERLOADED:
            raise self._away(response)

    async def answer(self, body: dict[str, Any], *, deadline_s: float) -> Answer:
        """The answer to a request, tried MAX_ATTEMPTS times; `deadline_s` is of the event loop's clock.

        Raises ModelAwayError, UnusableAnswerError and TimeoutError.
        """
        last: UnusableAnswerError | ModelAwayError | None = None
        delays = backoff_s(first_s=0.5, most_s=20.0)
        for attempt in range(MAX_ATTEMPTS):
            if attempt and not await _slept(next(delays), deadline_s):
                break
            try:
                response = await self._ask(body, deadline_s)
            except TimeoutError:
                if asyncio.get_running_loop().time() >= deadline_s:
                    raise
                last = UnusableAnswerError(f"no answer within {self._config.request_timeout_s:g} s")
                continue
            except httpx2.HTTPError as error:
                REQUESTS.labels(self._config.model, "unreachable").inc()
                kind = ModelAwayError if isinstance(error, _UNSENT) else UnusableAnswerError
                last = kind(f"judge {self._config.url}: {_described(error)}")
                continue
            if response.status == 200:
                return self._read(response)
            REQUESTS.labels(self._config.model, "refused").inc()
            last = self._failure(response)
            if response.status not in _MAY_PASS:
                break
        assert last is not None
        raise last

    async def _ask(self, body: dict[str, Any], deadline_s: float) -> _Response:
        loop = asyncio.get_running_loop()
        try:
            async with self._pace.turn(deadline_s=deadline_s):
                begun_s = loop.time()
                timeout_s = min(self._config.request_timeout_s, deadline_s - begun_s)
                response = await self._send("POST", "/chat/completions", body, timeout_s=timeout_s)
        except TimeoutError:
            REQUESTS.labels(self._config.model, "timed_out").inc()
            self._check_held()
            raise
        if response.status == 200:
            REQUEST_SECONDS.labels(self._config.model).observe(loop.time() - begun_s)
        elif response.retry_after_s is not None:
            self._pace.hold(min(response.retry_after_s, MOST_HELD_S))
        return response

    async def _send(self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float) -> _Response:
        """Raises httpx2.HTTPError and TimeoutError; what is longer than allowed counts as a broken response."""
        url = self._config.url.rstrip("/") + path
        async with (
            asyncio.timeout(timeout_s),
            self._client.stream(method, url, json=body, timeout=timeout_s, headers=headers()) as response,
        ):
            parts, num_bytes = [], 0
            async for part in response.aiter_bytes():
                num_bytes += len(part)
                if num_bytes > MAX_RESPONSE_BYTES:
                    raise httpx2.RemoteProtocolError(f"a response longer than {MAX_RESPONSE_BYTES} bytes")
                parts.append(part)
            return _Response(response.status_code, b"".join(parts), retry_after_s(response.headers))

    def _read(self, response: _Response) -> Answer:
        model = self._config.model
        num_prompt, num_completion = read_usage(response.body)
        TOKENS.labels(model, "prompt").inc(num_prompt)
        TOKENS.labels(model, "completion").inc(num_completion)
        prices = (self._config.prompt_price, self._config.completion_price)
        COST.labels(model).inc((num_prompt * prices[0] + num_completion * prices[1]) / 1e6)
        REQUESTS.labels(model, "answered").inc()
        return read_answer(response.body)

    def _failure(self, response: _Response) -> ModelAwayError | UnusableAnswerError:
        if response.status in _REFUSALS:
            return self._refusal(response)
        if response.status in _OVERLOADED:
            return self._away(response)
        return UnusableAnswerError(f"judge {self._config.url}: {self._said(response)}")

    def _refusal(self, response: _Response) -> JudgeRefusesError:
        words = _REFUSALS[response.status].format(key=self._config.key_variable, model=self._config.model)
        return JudgeRefusesError(f"judge {self._config.url} {words} ({self._said(response)})")

    def _away(self, response: _Response) -> ModelAwayError:
        return ModelAwayError(f"judge {self._config.url} is overloaded or away: {self._said(response)}")

    def _said(self, response: _Response) -> str:
        said = f"{response.status}: {read_error(response.body)}"
        return clean_text(said.replace(self._key, "[key]") if self._key else said, 300)

    def _check_held(self) -> None:
        if held_s := self._pace.held_s:
            raise ModelAwayError(f"judge {self._config.url} asked to wait for another {held_s:.0f} s")


async def _slept(delay_s: float, deadline_s: float) -> bool:
    """Whether there was time to."""
    if asyncio.get_running_loop().time() + delay_s >= deadline_s:
        return False
    await asyncio.sleep(delay_s)
    return True


def _tls(security: Security) -> ssl.SSLContext | bool:
    if security.ca_file is None:
        return True
    context = ssl.create_default_context(cafile=str(security.ca_file))
    if security.cert_file is not None and security.key_file is not None:
        context.load_cert_chain(security.cert_file, security.key_file)
    return context


def _host_port(url: str) -> str:
    place = url.partition("://")[2].partition("/")[0]
    return place if ":" in place.rpartition("]")[2] else f"{place}:0"


def _described(error: Exception) -> str:
    return clean_text(f"{type(error).__name__}: {error}".removesuffix(": "), 200)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds of a Retry-After header, which has seconds or a date; None if there is none that can be read."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.replace(".", "", 1).isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
