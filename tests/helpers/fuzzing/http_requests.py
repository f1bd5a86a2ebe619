"""HTTP requests that no honest client sends, as raw bytes, by a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

_METHODS = ("GET", "GET", "POST", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "G\0T", "X" * 300)
_PARTS = ("r", "x", "math", "..", "%2e%2e%2f%2e%2e", "%00", "a" * 3000, "\u4e2d", "%ff", "a b", "{run_id}", "?x=1")
_HEADERS = ("X-Penstock-Session", "X-Penstock-Group", "Idempotency-Key", "Cookie")
_RANGES = ("bytes=0-10", "bytes=-1", "bytes=5-2", "bytes=0-99999999999999999999", "bytes=a-b", "bytes=0-1,2-3", "x")
_VALUES: tuple[object, ...] = (
    *(None, True, 0, -1, 1, 3, 1e300, 2**63, "x", "", "user", "assistant", "\0", "\ud800", "a" * 5000),
    *([], {}, [None], [[]], [{"role": "user", "content": "hi"}], {"type": "function"}, ["x"] * 50),
)


class HttpFuzzer:
    """Random requests of routes such as ("POST", "/v1/sessions/{id}/reward"); `fields` are those of their bodies."""

    def __init__(self, seed: int, routes: Sequence[tuple[str, str]], fields: Mapping[str, object]) -> None:
        self._numbers = random.Random(seed)
        self._routes = routes
        self._fields = fields

    def request(self, headers: Mapping[str, str]) -> bytes:
        """A request: of the right form with any values, a damaged one, or garbage."""
        numbers = self._numbers
        if numbers.random() < 0.05:
            return numbers.randbytes(numbers.choice([1, 20, 9000])) + b"\r\n\r\n"
        request = self._formed(headers)
        return request if numbers.random() < 0.7 else self._damaged(request)

    def _formed(self, headers: Mapping[str, str]) -> bytes:
        numbers = self._numbers
        method, path = numbers.choice(self._routes)
        if numbers.random() < 0.15:
            method = numbers.choice(_METHODS)
        parts = [numbers.choice(_PARTS) if part.startswith("{") else part for part in path.split("/")]
        body = self._body() if method in ("POST", "PUT") else b""
        lines = [
            f"{method} {'/'.join(parts)} HTTP/1.1",
            "Host: x",
            *(f"{key}: {value}" for key, value in headers.items()),
        ]
        if numbers.random() < 0.3:
            lines.append(f"Range: {numbers.choice(_RANGES)}")
        if numbers.random() < 0.1:
            lines.append(
                f"{numbers.choice(['X-Penstock-Session', 'Cookie', 'Idempotency-Key'])}: {numbers.choice(_PARTS)}"
            )
        if numbers.random() < 0.02:
            lines += [f"X-{number}: y" for number in range(500)]
        if numbers.random() < 0.1:
            lines.append("Transfer-Encoding: chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body) + numbers.choice([0, 0, 1]), body)
        elif body or method in ("POST", "PUT"):
            lines.append(f"Content-Length: {numbers.choice([len(body)] * 8 + [0, -1])}")
        lines += ["Content-Type: application/json", "Connection: close", "", ""]
        return "\r\n".join(lines).encode("utf-8", "surrogatepass") + body

    def _body(self) -> bytes:
        numbers = self._numbers
        kind = numbers.random()
        if kind < 0.05:
            return b"[" * numbers.choice([10, 20_000])
        if kind < 0.1:
            return numbers.randbytes(50)
        body = {}
        for name, honest in self._fields.items():
            if numbers.random() < 0.8:
                body[name] = honest if numbers.random() < 0.7 else numbers.choice(_VALUES)
        return json.dumps(body).encode("utf-8", "surrogatepass")

    def _damaged(self, request: bytes) -> bytes:
        numbers, found = self._numbers, bytearray(request)
        for _ in range(numbers.randint(1, 4)):
            place = numbers.randrange(len(found))
            found[place : place + numbers.randint(0, 3)] = numbers.randbytes(numbers.randint(0, 3))
        return bytes(found)
