"""Turns an environment's messages into the tokens that a model reads between its turns.

A chat is rendered by the model's own template; no token that was sampled is tokenised again. A prompt that was text
goes on as text: messages follow the model's words without anything between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.v1 import types_pb2

Message = dict[str, Any]


class UnrenderableError(Exception):
    """The model's chat template does not take the messages; says which roles they have."""


class ChatTokenizer(Protocol):
    """A model's tokenizer and chat template."""

    async def encode_tail(self, text: str) -> list[int]:
        """Tokens of text that follows other text."""

    async def chat_tail(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, num_known: int
    ) -> str | None:
        """The template's text between the answer that ends the first `num_known` messages and the next answer."""

    async def opening_tail(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, *, num_known: int
    ) -> str | None:
        """The template's text between the first `num_known` messages and the first answer."""

    def raw_text_of(self, token_ids: Sequence[int]) -> str:
        """The text with special tokens."""


class Renderer(Protocol):
    """The conversation of one sample; the calls follow it in order."""

    async def opening(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """Tokens between the prompt and the first turn. Raises UnrenderableError."""

    async def answer(self, text: str, last_token_id: int, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """Tokens between a turn of that text, which ended in this token, and the next one. Raises UnrenderableError."""


class ChatRenderer:
    """A chat, by the model's template.

    Args:
        tokenizer: The model's.
        prompt: The data row's messages.
        tools: What the model is shown, in OpenAI's form.
        opens: Whether prompts end without opening an answer.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        prompt: Sequence[types_pb2.ChatMessage],
        tools: Sequence[Message] | None,
        *,
        opens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = tools
        self._opens = opens
        self._messages = _as_messages(prompt)

    async def opening(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.opening`."""
        num_known = len(self._messages)
        self._messages += _as_messages(messages)
        if not self._opens:
            _check_unsaid(messages)
            return []
        tail = await self._tokenizer.opening_tail(self._messages, self._tools, num_known=num_known)
        return await self._encode(tail, messages)

    async def answer(self, text: str, last_token_id: int, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.answer`."""
        self._messages.append({"role": "assistant", "content": text})
        num_known = len(self._messages)
        self._messages += _as_messages(messages)
        tail = await self._tokenizer.chat_tail(self._messages, self._tools, num_known=num_known)
        # The template writes the end of the answer, which the model has written itself.
        said = self._tokenizer.raw_text_of([last_token_id])
        return await self._encode(tail if tail is None else tail.removeprefix(said), messages)

    async def _encode(self, tail: str | None, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        if tail is None:
            roles = ", ".join(sorted({message.role for message in messages})) or "none"
            raise UnrenderableError(f"the model's chat template does not take messages of these roles here: {roles}")
        return await self._tokenizer.encode_tail(tail)


class TextRenderer:
    """A prompt that was text, which goes on as text."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def opening(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.opening`."""
        return await self._encode(messages)

    async def answer(self, text: str, last_token_id: int, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.answer`."""
        del text, last_token_id
        return await self._encode(messages)

    async def _encode(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        return await self._tokenizer.encode_tail("".join(message.content for message in messages))


class IdRenderer:
    """An emulated model without a tokenizer: ids written as text are themselves, of other text four bytes are one."""

    async def opening(self, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.opening`."""
        return _ids(messages)

    async def answer(self, text: str, last_token_id: int, messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
        """See `Renderer.answer`."""
        del text, last_token_id
        return _ids(messages)


def _ids(messages: Sequence[types_pb2.ChatMessage]) -> list[int]:
    text = " ".join(message.content for message in messages)
    words = text.split()
    if all(word.isdecimal() for word in words):
        return [int(word) for word in words]
    return [1] * -(-len(text.encode()) // 4)


def _as_messages(messages: Sequence[types_pb2.ChatMessage]) -> list[Message]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _check_unsaid(messages: Sequence[types_pb2.ChatMessage]) -> None:
    if messages:
        raise UnrenderableError("reset answers with messages, but GetEnvironment does not say that it `opens`")
