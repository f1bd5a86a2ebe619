"""Formats answers in OpenAI's form: whole, and as chunks of a stream. Pure.

Plain mappings: the types of the `openai` package take 2 s and 44 MiB to import, and write out every unused field.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from services.generator.openai.answer_sampling import Answer, Piece
from services.generator.openai.endpoint import Prepared
from services.generator.openai.formats.chat_template import ConversationTokenizer
from services.generator.openai.formats.openai_requests import ChatRequest, SamplingRequest

END_OF_STREAM = b"data: [DONE]\n\n"
_CHUNK = "chat.completion.chunk"


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """Fields shared by all parts of one response."""

    response_id: str
    created_s: int
    model: str
    body: SamplingRequest
    tokenizer: ConversationTokenizer

    @property
    def is_chat(self) -> bool:
        """Chat, or plain completion."""
        return isinstance(self.body, ChatRequest)

    def whole(self, prepared: Prepared, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole response, not streamed."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        oldest = min(int(answer.sampled.versions.min()) for answer in answers)
        made = self._frame(choices, chat_kind="chat.completion")
        made["system_fingerprint"] = f"policy-{oldest}"
        made["usage"] = usage(prepared, answers)
        if self.body.return_token_ids:
            made["prompt_token_ids"] = list(prepared.prompt_token_ids)
        return made

    def first_chunk(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice."""
        return self._chunk(index, delta={"role": "assistant", "content": ""}) if self.is_chat else None

    def piece_chunk(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The next chunk; None if there is nothing to send."""
        logprobs = self._logprobs(piece.tokens)
        if not piece.text and not logprobs:
            return None
        return self._chunk(index, **self._shown(piece.text), logprobs=logprobs)

    def last_chunks(self, index: int, answer: Answer) -> list[dict[str, Any]]:
        """The rest of a choice, and why it ended."""
        rest = answer.content[answer.num_shown :]
        extra = {"token_ids": answer.sampled.token_ids.tolist()} if self.body.return_token_ids else {}
        if not self.is_chat:
            return [self._chunk(index, **self._shown(rest), finish_reason=answer.finish_reason, **extra)]
        chunks = [self._chunk(index, **self._shown(rest))] if rest else []
        calls = [{"index": position} | call.as_json() for position, call in enumerate(answer.tool_calls)]
        if calls:
            chunks.append(self._chunk(index, delta={"tool_calls": calls}))
        return [*chunks, self._chunk(index, delta={}, finish_reason=answer.finish_reason, **extra)]

    def usage_chunk(self, prepared: Prepared, answers: Sequence[Answer]) -> dict[str, Any]:
        """The token counts of a stream."""
        return self._frame([], chat_kind=_CHUNK) | {"usage": usage(prepared, answers)}

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": answer.finish_reason}
        choice["logprobs"] = self._logprobs(answer.shown_tokens)
        if self.is_chat:
            calls = [call.as_json() for call in answer.tool_calls]
            content = answer.content.strip() or None if calls else answer.content
            choice["message"] = {"role": "assistant", "content": content}
            if calls:
                choice["message"]["tool_calls"] = calls
        else:
            choice["text"] = answer.text
        if self.body.return_token_ids:
            choice["token_ids"] = answer.sampled.token_ids.tolist()
        return choice

    def _logprobs(self, tokens: Sequence[tuple[int, float]]) -> dict[str, Any] | None:
        body = self.body
        is_wanted = body.logprobs if isinstance(body, ChatRequest) else getattr(body, "logprobs", None) is not None
        if not is_wanted or not tokens:
            return None
        texts = [self.tokenizer.raw_text_of([token_id]) for token_id, _ in tokens]
        if self.is_chat:
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, (_, logprob) in zip(texts, tokens, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = list(accumulate(map(len, texts[:-1]), initial=0))
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _shown(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}} if self.is_chat else {"text": text}

    def _chunk(self, index: int, **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | fields
        return self._frame([choice], chat_kind=_CHUNK)

    def _frame(self, choices: list[dict[str, Any]], *, chat_kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": chat_kind if self.is_chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def usage(prepared: Prepared, answers: Sequence[Answer]) -> dict[str, int]:
    """Numbers of input and output tokens."""
    num_prompt = len(prepared.prompt_token_ids)
    num_sampled = sum(len(answer.sampled.token_ids) for answer in answers)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
