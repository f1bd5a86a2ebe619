"""The configuration's words for how samples are treated, as the broker takes them."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError, validate
from penstock.v1 import broker_pb2
from services.trainer.config import TrainingConfig
from services.trainer.run.context import run_policy
from services.trainer.run_sections import SamplePolicyConfig


def test_the_defaults_are_the_brokers_own() -> None:
    assert run_policy(SamplePolicyConfig()) == broker_pb2.RunPolicy(
        stale=broker_pb2.STALE_POLICY_WAIT,
        partial_groups=broker_pb2.PARTIAL_GROUP_POLICY_SHRINK,
        num_retained_steps=64,
        max_retained_bytes=4 * 1024**3,
        dispatch="auto",
        token_shards=1,
    )


@pytest.mark.parametrize("stale", ["wait", "drop", "continue"])
@pytest.mark.parametrize("partial_groups", ["wait", "drop", "shrink"])
def test_every_word_has_its_enum_value(stale: str, partial_groups: str) -> None:
    config = SamplePolicyConfig.model_validate(
        {"stale": stale, "partial_groups": partial_groups, "drops_zero_variance": True, "num_extra_samples": 2}
    )
    found = run_policy(config)
    assert broker_pb2.StalePolicy.Name(found.stale) == f"STALE_POLICY_{stale}".upper()
    assert broker_pb2.PartialGroupPolicy.Name(found.partial_groups) == f"PARTIAL_GROUP_POLICY_{partial_groups}".upper()
    assert (found.drops_zero_variance, found.num_extra_samples) == (True, 2)


def test_groups_that_no_broker_takes_are_refused_before_anything_starts() -> None:
    document = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "algorithm": {"group_size": 1000},
        "policy": {"num_extra_samples": 25},
    }
    with pytest.raises(ConfigError, match=r"num_extra_samples: makes groups of 1025 samples"):
        validate(TrainingConfig, document, source="here")
