"""An answer's tokens and their routes end together."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import numpy as np

from services.generator.engine.engine import FinishReason, GenerateRequest, SamplingSettings, TokenSpan
from services.generator.openai.answer_sampling import take_answer
from services.generator.openai.formats.chat_template import ConversationTokenizer


class Letters:
    """Token 97 is "a", and so on."""

    def stream(self) -> Any:
        return chr

    def text_of(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


async def spans(*texts: str, num_prompt_rows: int) -> AsyncGenerator[TokenSpan, None]:
    first = 0
    for number, text in enumerate(texts):
        num_rows = len(text) + (0 if number else num_prompt_rows)
        yield TokenSpan(
            token_ids=np.array([ord(letter) for letter in text], np.int32),
            logprobs=np.full(len(text), -0.5, np.float32),
            policy_version=0,
            finish_reason=FinishReason.LENGTH if number + 1 == len(texts) else None,
            routes=np.arange(first, first + num_rows, dtype=np.uint8).reshape(-1, 1, 1),
        )
        first += num_rows


async def show(_piece: object) -> None:
    pass


async def test_routes_beyond_a_stop_string_are_left_out() -> None:
    request = GenerateRequest(
        request_id="r", prompt_token_ids=(1, 2, 3), sampling=SamplingSettings(max_new_tokens=9), has_routes=True
    )
    for stops, text in (((), "abcdef"), (("e",), "abcd")):
        answer = await take_answer(
            spans("abc", "def", num_prompt_rows=2),
            request,
            tokenizer=cast("ConversationTokenizer", Letters()),
            stops=stops,
            emit=show,
            finds_tools=False,
            run_history=lambda: 0,
        )
        assert answer.text == text
        num_tokens = len(answer.sampled.token_ids)
        assert num_tokens == len(text) + len(stops)
        assert answer.sampled.routes is not None
        assert answer.sampled.routes.ravel().tolist() == list(range(2 + num_tokens))
