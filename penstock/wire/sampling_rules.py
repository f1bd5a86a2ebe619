"""Which sampling parameters can be trained on: the trainer recomputes log-probs of the distribution drawn from.

They are those of softmax(logits / temperature) over the whole vocabulary, at the temperature of each prompt. A cut
(`top_p`, `top_k`) renormalises the rest, and later weights cannot tell exactly which tokens were left.
Greedy decoding draws from no distribution at all.
"""

from __future__ import annotations

from penstock.errors import InvalidFieldError
from penstock.v1 import types_pb2

MIN_TEMPERATURE = 0.01
"""Least temperature of samples to train on. vLLM takes what is between 0 and this for this."""
MAX_TEMPERATURE = 100.0
_CUT = "the trainer's log-probs are of the whole distribution"
_ROUNDING = 1e-6
"""Temperatures are float32 on the wire: 0.01 comes as 0.0099999998."""


def temperature_of(sampling: types_pb2.SamplingParams) -> float:
    """Its softmax temperature; 1 where it is not set."""
    return sampling.temperature if sampling.HasField("temperature") else 1.0


def check_trainable(sampling: types_pb2.SamplingParams, *, field: str = "sampling") -> None:
    """Raise InvalidFieldError naming the field and the fix if samples drawn like this cannot be trained on."""
    if sampling.HasField("top_p") and sampling.top_p != 1.0:
        raise _refusal(f"{field}.top_p", round(sampling.top_p, 6), "unset or 1", _CUT)
    if sampling.HasField("top_k"):
        raise _refusal(f"{field}.top_k", sampling.top_k, "unset", _CUT)
    temperature = temperature_of(sampling)
    # Written so that a NaN is refused.
    if not MIN_TEMPERATURE - _ROUNDING <= temperature <= MAX_TEMPERATURE:
        wanted = f"{MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}, or unset for 1"
        raise _refusal(f"{field}.temperature", round(temperature, 6), wanted, "0 is greedy, which draws nothing")


def _refusal(field: str, value: float, wanted: str, why: str) -> InvalidFieldError:
    return InvalidFieldError(f"{field}: {value!r}; must be {wanted} for training: {why}", field=field)
