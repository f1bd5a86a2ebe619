"""Token ids in, token ids out: the body of /inference/v1/generate, and its answer. Pure.

The form is vLLM's, as the train client of verifiers 0.4 (renderers 0.1) and SkyRL send and read it. Each log-prob names
its token twice, as `token_id:N` and as a number: the former is what renderers 0.1 checks, the latter vLLM's newer form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from services.generator.openai.answer_sampling import Answer
from services.generator.openai.endpoint import Prepared
from services.generator.openai.formats.api_errors import invalid
from services.generator.openai.formats.openai_requests import CompletionRequest, checked
from services.generator.openai.responses import Form, usage

MAX_PROMPT_TOKENS = 4 * 1024 * 1024
_NOT_OFFERED: Mapping[str, tuple[object, ...]] = {
    "stream": (None, False),
    "features": (None,),
    "content_parts": (None, []),
    "output_mode": (None, "tokens"),
    "kv_transfer_params": (None,),
    "ec_transfer_params": (None,),
}


class TokenRequest(BaseModel):
    """Body of /inference/v1/generate; unknown fields are ignored, as on the other routes."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    model: str | None = Field(default=None, max_length=256)
    request_id: str | None = Field(default=None, max_length=256)
    token_ids: list[int] = Field(min_length=1, max_length=MAX_PROMPT_TOKENS)
    sampling_params: dict[str, Any] = Field(default_factory=dict, max_length=64)

    def completion(self) -> CompletionRequest:
        """The same request as one of /v1/completions, which checks the rest. Raises ApiError."""
        for name, neutral in _NOT_OFFERED.items():
            if (self.model_extra or {}).get(name) not in neutral:
                raise invalid(name, "is not offered here; leave it out")
        params = dict(self.sampling_params)
        for name, neutral in (("logprobs", (None, 0, 1)), ("prompt_logprobs", (None,))):
            if params.pop(name, None) not in neutral:
                raise invalid(f"sampling_params.{name}", "log-probs of sampled tokens alone are offered")
        document = {**params, "model": self.model, "prompt": self.token_ids, "logprobs": 0, "return_token_ids": True}
        return checked(CompletionRequest, document)


class TokenForm(Form):
    """An answer in that form."""

    def whole(self, prepared: Prepared, answers: Sequence[Answer]) -> dict[str, Any]:
        """The whole response."""
        oldest = min(int(answer.sampled.versions.min()) for answer in answers)
        return {
            "request_id": self.response_id,
            "model": self.model,
            "created": self.created_s,
            "system_fingerprint": f"policy-{oldest}",
            "prompt_token_ids": list(prepared.prompt_token_ids),
            "choices": [_choice(index, answer) for index, answer in enumerate(answers)],
            "usage": usage(prepared, answers),
        }


def _choice(index: int, answer: Answer) -> dict[str, Any]:
    token_ids = answer.sampled.token_ids.tolist()
    content = [
        {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, "top_logprobs": []}
        for token_id, logprob in zip(token_ids, answer.sampled.logprobs.tolist(), strict=True)
    ]
    reason = "length" if answer.sampled.is_truncated else "stop"
    return {"index": index, "token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": reason}
