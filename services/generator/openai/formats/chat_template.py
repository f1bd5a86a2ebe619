"""Converts conversations to tokens by the model's own tokenizer and chat template.

To continue a conversation exactly, the template is rendered with a mark in place of the last answer, and the text after
the mark is tokenised alone and appended to the answer's own tokens. So no sampled token is ever tokenised again,
whatever a template does with answers (strips them, rewrites tool calls, omits thoughts).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer

from services.generator.openai.formats.api_errors import ApiError

_T = TypeVar("_T")
Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]] | None


class ConversationTokenizer:
    """One model's tokenizer. Tokenises in one thread of its own, since tokenizers are not thread-safe.

    Raises ValueError if the model's folder has no fast tokenizer.
    """

    def __init__(self, model_path: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(model_path), local_files_only=True)
        except OSError as error:
            raise ValueError(f"openai.listen: {model_path}: no usable tokenizer: {error}") from error
        if not self._tokenizer.is_fast:
            raise ValueError(f"openai.listen: {model_path}: needs a tokenizer.json; this tokenizer has none")
        self._mark = f"answer-{secrets.token_hex(12)}"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def encode_text(self, text: str) -> list[int]:
        """A text prompt's tokens, with the tokenizer's own prefix."""
        return await self._in_thread(lambda: self._encode(text, adds_special=True))

    async def encode_tail(self, text: str) -> list[int]:
        """Tokens of text that follows other text."""
        return await self._in_thread(lambda: self._encode(text, adds_special=False))

    async def encode_chat(self, messages: Messages, tools: Tools) -> list[int]:
        """Tokens of a conversation with the next answer opened; raises ApiError if the template refuses it."""

        def encode() -> list[int]:
            try:
                # The template itself writes every special token.
                return self._encode(self._render(messages, tools), adds_special=False)
            except (ValueError, TemplateError, TypeError) as error:
                raise ApiError(
                    400, f"messages: the model's chat template does not take them: {error}", param="messages"
                ) from error

        return await self._in_thread(encode)

    async def chat_tail(self, messages: Messages, tools: Tools, *, num_known: int) -> str | None:
        """The template's text between the answer that ends the first `num_known` messages and the next answer.

        None if the template does not show that answer exactly once, so that this text cannot be determined.
        """

        def render() -> str | None:
            answer = {"role": "assistant", "content": self._mark}
            try:
                text = self._render([*messages[: num_known - 1], answer, *messages[num_known:]], tools)
            except (ValueError, TemplateError, TypeError):
                return None
            _, mark, tail = text.partition(self._mark)
            return tail if mark and self._mark not in tail else None

        return await self._in_thread(render)

    async def opening_tail(self, messages: Messages, tools: Tools, *, num_known: int) -> str | None:
        """The template's text between the first `num_known` messages and the first answer.

        None if the template writes those messages otherwise once others follow, or refuses them.
        """

        def render() -> str | None:
            try:
                known = self._render(messages[:num_known], tools, opens_answer=False)
                text = self._render(messages, tools)
            except (ValueError, TemplateError, TypeError):
                return None
            return text.removeprefix(known) if text.startswith(known) else None

        return await self._in_thread(render)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def raw_text_of(self, token_ids: Sequence[int]) -> str:
        """The text with special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def stream(self) -> Callable[[int], str]:
        """Decodes token by token; incomplete characters are buffered until complete."""
        backend, decoder = self._tokenizer.backend_tokenizer, DecodeStream(skip_special_tokens=True)

        def step(token_id: int) -> str:
            return decoder.step(backend, token_id) or ""

        return step

    def _render(self, messages: Messages, tools: Tools, *, opens_answer: bool = True) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=opens_answer
        )
        return text

    def _encode(self, text: str, *, adds_special: bool) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=adds_special, return_attention_mask=False)["input_ids"])

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
