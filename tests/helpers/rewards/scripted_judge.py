"""An OpenAI-compatible endpoint that answers what a function says, over real HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Body = dict[str, Any]
Behaviour = Callable[[Body], Any]


def verdict(**scores: int) -> str:
    """An answer to a rubric."""
    return json.dumps({"reason": "because", "scores": scores})


def completion(content: str, **changes: Any) -> Body:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20}
    return {"model": "judge-1", "system_fingerprint": "fp-a", "choices": [choice], "usage": usage, **changes}


class ScriptedJudge:
    """`behave(body)` returns the text of an answer, a whole document, or an aiohttp response; it may be async."""

    def __init__(self, behave: Behaviour) -> None:
        self.behave = behave
        self.bodies: list[Body] = []
        self.keys: list[str] = []
        self.traces: list[str] = []
        self.is_up = True
        self.num_running = 0
        self.most_running = 0
        self.num_probes = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.StreamResponse:
        if not self.is_up:
            return web.json_response({"error": {"message": "loading"}}, status=503)
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        self.traces.append(request.headers.get("traceparent", ""))
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            answer = self.behave(body)
            if inspect.isawaitable(answer):
                answer = await answer
            await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        if isinstance(answer, web.StreamResponse):
            return answer
        return web.json_response(completion(answer) if isinstance(answer, str) else answer)

    async def models(self, _request: web.Request) -> web.Response:
        self.num_probes += 1
        return web.json_response({"data": []}, status=200 if self.is_up else 503)


def refusal(status: int, message: str, **headers: str) -> web.Response:
    """An error in OpenAI's form."""
    return web.json_response({"error": {"message": message}}, status=status, headers=headers)


@asynccontextmanager
async def scripted_judge(behave: Behaviour) -> AsyncIterator[ScriptedJudge]:
    """A judge on a port of 127.0.0.1."""
    judge = ScriptedJudge(behave)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge.complete)
    app.router.add_get("/v1/models", judge.models)
    async with TestServer(app, host="127.0.0.1") as server:
        judge.url = str(server.make_url("/v1"))
        yield judge


def material(body: Body) -> Body:
    """What the judge is asked to grade."""
    return json.loads(body["messages"][-1]["content"].split("\n")[1])
