"""Converts requests to vLLM's form, and vLLM's outputs to token spans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.wire.routes import Routes
from services.generator.engine.engine import EngineError, FinishReason, GenerateRequest, SamplingSettings, TokenSpan

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

_FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORTED,
}


def version_starts(output: RequestOutput, live: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Pairs of a version and the index of its first completion token, in order.

    During decoding only vLLM's own state has them; the last output carries them itself.
    """
    final = output.outputs[0].weight_versions
    return live if final is None else [(span.version, span.start) for span in final]


def to_spans(
    output: RequestOutput,
    starts: Sequence[tuple[str, int]],
    *,
    offset: int,
    default_version: int,
    routes: Routes | None = None,
) -> Iterator[TokenSpan]:
    """The output's new tokens, split where the version changes; `offset` completion tokens precede them.

    `routes` has a row for each of them, after those of a prompt.
    """
    completion = output.outputs[0]
    finish = _finish_reason(completion.finish_reason)
    token_ids = np.asarray(completion.token_ids, np.int32)
    logprobs = np.asarray(completion.logprobs.logprobs if completion.logprobs else (), np.float32)
    if len(token_ids) != len(logprobs):
        raise EngineError(f"vLLM answered {len(token_ids)} tokens with {len(logprobs)} log-probs")
    if not starts and len(token_ids):
        raise EngineError("vLLM answered tokens of no known version")
    ends = [start - offset for _, start in starts[1:]] + [len(token_ids)] * bool(starts)
    num_prompt_rows = 0 if routes is None else len(routes) - len(token_ids)
    if num_prompt_rows < 0:
        raise EngineError(f"vLLM answered {len(token_ids)} tokens with routes of {num_prompt_rows + len(token_ids)}")
    begin = 0
    for (version, _), end in zip(starts, ends, strict=True):
        if end > begin:
            yield TokenSpan(
                token_ids=token_ids[begin:end],
                logprobs=logprobs[begin:end],
                policy_version=int(version),
                finish_reason=finish if end == len(token_ids) else None,
                routes=None if routes is None else routes[begin and num_prompt_rows + begin : num_prompt_rows + end],
            )
            begin = end
    if begin == 0 and finish is not None:
        yield TokenSpan.empty(policy_version=int(starts[-1][0]) if starts else default_version, finish_reason=finish)


def _finish_reason(name: str | None) -> FinishReason | None:
    if name is None:
        return None
    if name not in _FINISH_REASONS:
        raise EngineError(f"vLLM ended a sample with {name!r}")
    return _FINISH_REASONS[name]


def _first_row(request: GenerateRequest) -> int:
    num_tokens = len(request.prompt_token_ids) + len(request.prefix_token_ids)
    return 0 if request.has_routes and not request.prefix_token_ids else num_tokens - 1


def sampling_params(request: GenerateRequest, *, max_tokens: int, is_seeded: bool) -> SamplingParams:
    """The request's sampling parameters for vLLM."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling: SamplingSettings = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or 0,
        seed=sampling.seed_after(len(request.prefix_token_ids)) if is_seeded else None,
        max_tokens=max_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        # The request determines the stop tokens, not the model's generation config.
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        # Routes of earlier positions were recorded under an earlier lease, or are not wanted.
        routed_experts_prompt_start=_first_row(request),
    )
