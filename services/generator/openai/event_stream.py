"""Sends a response as server-sent events; until the first event, a refusal can still set the status."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from services.generator.openai.answer_sampling import Answer, Piece
from services.generator.openai.endpoint import Agents, Prepared
from services.generator.openai.responses import END_OF_STREAM, Form, event


class EventStream:
    """The answers to one request. A slow client holds back only its own decoding."""

    def __init__(self, request: web.Request, *, agents: Agents, prepared: Prepared, form: Form) -> None:
        self._request = request
        self._agents = agents
        self._prepared = prepared
        self._form = form
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

    @property
    def is_begun(self) -> bool:
        """Whether the status was already sent."""
        return self.response.prepared

    async def answer(self, index: int) -> Answer:
        """Sample one choice, sending it as it is decoded."""
        form, opening = self._form, self._form.first_chunk(index)

        async def emit(piece: Piece) -> None:
            nonlocal opening
            first, opening = opening, None
            await self.write(first)
            await self.write(form.piece_chunk(index, piece))

        made = await self._agents.answer(self._prepared, index=index, emit=emit)
        for chunk in [opening, *form.last_chunks(index, made)]:
            await self.write(chunk)
        return made

    async def repeat(self, index: int, answer: Answer) -> Answer:
        """Send one choice that was sampled before."""
        form = self._form
        shown = Piece(text=answer.content[: answer.num_shown], tokens=answer.shown_tokens)
        for chunk in [form.first_chunk(index), form.piece_chunk(index, shown), *form.last_chunks(index, answer)]:
            await self.write(chunk)
        return answer

    async def end(self, answers: list[Answer]) -> None:
        """End the stream, after its usage if requested."""
        options = self._prepared.body.stream_options
        if options is not None and options.include_usage:
            await self.write(self._form.usage_chunk(self._prepared, answers))
        await self.response.write(END_OF_STREAM)
        await self.response.write_eof()

    async def write(self, data: dict[str, Any] | None) -> None:
        """Send one event, if it is not None."""
        if data is None:
            return
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(event(data))
