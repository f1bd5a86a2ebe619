"""Groups in the form of Atropos (`ScoredDataGroup`), as groups of a run. Pure.

    tokens[i]               prompt and completion of sample i
    masks[i]                -100 where a token was given, else the token itself
    inference_logprobs[i]   of each token; anything where it was given
    scores[i]               its reward
    advantages[i]           of each token; left out, the trainer computes them

What samples share at the beginning, all of it given, is the prompt; given tokens after that are masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2
from penstock.wire.trajectory_groups import Sample, make_group, make_prompt

GIVEN = -100
MAX_SAMPLES = 1024
MAX_TOKENS = 4 * 1024 * 1024
"""Of one group."""


def read_scored_data(
    document: Mapping[str, Any], *, group_id: str, policy_version: int | None = None
) -> types_pb2.TrajectoryGroup:
    """The group.

    Args:
        document: As its JSON says.
        group_id: Names the group in the run.
        policy_version: What sampled it, where `group_overrides.policy_version` does not say.

    Raises InvalidFieldError naming the field.
    """
    if document.get("images"):
        raise _invalid("images", "samples of text alone are trained on")
    tokens = _lists(document, "tokens")
    num_samples = len(tokens)
    if not 0 < num_samples <= MAX_SAMPLES or sum(map(len, tokens)) > MAX_TOKENS:
        raise _invalid("tokens", f"1 to {MAX_SAMPLES} samples of at most {MAX_TOKENS} tokens in all")
    masks = _lists(document, "masks", like=tokens)
    logprobs = _lists(document, "inference_logprobs", like=tokens)
    advantages = _lists(document, "advantages", like=tokens) if document.get("advantages") else None
    scores = document.get("scores")
    if not isinstance(scores, list) or len(scores) != num_samples or not all(map(_is_finite, scores)):
        raise _invalid("scores", f"one finite number for each of the {num_samples} samples")
    given = [_given(index, *pair) for index, pair in enumerate(zip(tokens, masks, strict=True))]
    num_prompt = _shared(tokens, given)
    samples = [
        Sample(
            token_ids=tokens[index][num_prompt:],
            logprobs=_behaviour(index, logprobs[index], given[index])[num_prompt:],
            policy_version=_version(document, policy_version),
            reward=float(scores[index]),
            loss_mask=[int(not each) for each in given[index][num_prompt:]],
            advantages=None if advantages is None else [float(each) for each in advantages[index][num_prompt:]],
        )
        for index in range(num_samples)
    ]
    return make_group(make_prompt(tokens[0][:num_prompt], group_id=group_id), samples)


def _lists(document: Mapping[str, Any], name: str, *, like: Sequence[list[Any]] | None = None) -> list[list[Any]]:
    found = document.get(name)
    kind = int if name in ("tokens", "masks") else float
    if not isinstance(found, list) or not all(isinstance(each, list) and each for each in found):
        raise _invalid(name, "a list for each sample is needed, none of them empty")
    if like is not None and [len(each) for each in found] != [len(each) for each in like]:
        raise _invalid(name, "one entry for each of `tokens` is needed")
    for each in found:
        is_fine = all(map(_is_finite, each)) and (kind is float or all(isinstance(value, int) for value in each))
        if not is_fine:
            raise _invalid(name, f"must be {'whole' if kind is int else 'finite'} numbers")
    if name == "tokens" and not all(0 <= token_id < 2**31 for each in found for token_id in each):
        raise _invalid(name, "token ids must be in [0, 2**31)")
    return found


def _given(index: int, tokens: list[int], mask: list[int]) -> list[bool]:
    """Whether each token was given."""
    for position, (token_id, masked) in enumerate(zip(tokens, mask, strict=True)):
        if masked not in (GIVEN, token_id):
            raise _invalid(f"masks[{index}][{position}]", f"{masked}; must be {GIVEN} or the token, {token_id}")
    return [masked == GIVEN for masked in mask]


def _shared(tokens: Sequence[list[int]], given: Sequence[list[bool]]) -> int:
    """Tokens that all samples begin with, all of them given, and something after them in each."""
    least = min(map(len, tokens)) - 1
    num = 0
    while num < least and all(each[num] for each in given) and len({each[num] for each in tokens}) == 1:
        num += 1
    if num == 0:
        raise _invalid("masks", "samples of a group begin with the same given token at least: their prompt")
    if all(all(each[num:]) for each in given):
        raise _invalid("masks", "no token was sampled")
    return num


def _behaviour(index: int, logprobs: list[float], given: list[bool]) -> list[float]:
    for position, (logprob, is_given) in enumerate(zip(logprobs, given, strict=True)):
        if not is_given and logprob > 0:
            where = f"inference_logprobs[{index}][{position}]"
            raise _invalid(where, f"{logprob}; a log-prob of a sampled token is at most 0")
    return [0.0 if is_given else float(logprob) for logprob, is_given in zip(logprobs, given, strict=True)]


def _version(document: Mapping[str, Any], stated: int | None) -> int:
    overrides = document.get("group_overrides")
    found = overrides.get("policy_version", stated) if isinstance(overrides, Mapping) else stated
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise _invalid("group_overrides.policy_version", f"{found!r}; the version that sampled the group is needed")
    return found


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid(field: str, what: str) -> InvalidFieldError:
    return InvalidFieldError(f"{field}: {what}", field=field)
