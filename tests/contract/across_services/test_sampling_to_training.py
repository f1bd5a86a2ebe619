"""The trainer computes what a generator sampled: the same log-probs on the same weights, at any temperature."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.errors import InvalidFieldError
from penstock.v1 import broker_pb2, types_pb2
from penstock.wire.codec import encode_versions, float32_bytes, int32_bytes
from services.generator.decoding.lease_request import to_request
from services.generator.engines.transformers.batch_decoder import BatchDecoder, Row
from services.trainer.algorithms.base import Clip
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.loss import LossSettings, policy_loss
from services.trainer.batches.group_decoder import training_samples
from services.trainer.batches.packing import pack_trajectories
from services.trainer.batches.training_sample import trajectory_of
from services.trainer.distributed.rank_backend import RankBackend
from services.trainer.model.model_loading import ModelSettings
from services.trainer.run_sections import OptimizerConfig
from tests.unit.trainer.builders import save_tiny_qwen2, scores_of

NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return save_tiny_qwen2(tmp_path_factory.mktemp("model"))


def sampled(model_path, **sampling) -> types_pb2.TrajectoryGroup:
    """A group of two, decoded as a generator decodes a lease of its prompt."""
    prompt = types_pb2.Prompt(
        group_id="g",
        token_ids=int32_bytes([3, 5, 7]),
        group_size=2,
        sampling=types_pb2.SamplingParams(max_new_tokens=NUM_TOKENS, seed=1, **sampling),
        purpose=types_pb2.PURPOSE_TRAIN,
    )
    leases = [
        broker_pb2.Lease(lease_id=f"l{index}", key=types_pb2.SampleKey(group_id="g", sample_index=index), prompt=prompt)
        for index in range(2)
    ]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    decoder = BatchDecoder(model, seed=0)
    rows = [Row.of(to_request(lease, end_token_ids=()), num_left=NUM_TOKENS) for lease in leases]
    decoder.join(rows)
    while decoder.rows:
        decoder.step()
    return types_pb2.TrajectoryGroup(prompt=prompt, trajectories=[_trajectory(i, row) for i, row in enumerate(rows)])


def _trajectory(index: int, row: Row) -> types_pb2.Trajectory:
    return types_pb2.Trajectory(
        key=types_pb2.SampleKey(group_id="g", sample_index=index),
        token_ids=int32_bytes(row.new_token_ids),
        behavior_logprobs=float32_bytes(row.new_logprobs),
        policy_versions=encode_versions(np.zeros(len(row.new_token_ids), np.int64)),
        score=types_pb2.Score(status=types_pb2.SCORE_STATUS_OK, value=float(index)),
    )


def test_trainer_and_generator_agree_on_samples_of_any_temperature(model_path):
    """Groups of unlike temperatures, one of which leaves it unset, in one pack."""
    groups = [sampled(model_path, **given) for given in ({"temperature": 0.5}, {}, {"temperature": 1.5, "top_p": 1.0})]
    samples = [sample for group in groups for sample in training_samples(group)]
    assert [sample.temperature for sample in samples] == [0.5, 0.5, 1.0, 1.0, 1.5, 1.5]
    (pack,) = pack_trajectories([trajectory_of(sample, 1.0) for sample in samples], max_pack_tokens=1000)
    settings = LossSettings(clip=Clip(low=0.2, high=0.2))
    backend = RankBackend(
        model=ModelSettings(path=model_path, dtype="float32", device="cpu"),
        optimizer=OptimizerConfig(),
        loss=partial(policy_loss, algorithm=DAPO, settings=settings),
        seed=0,
    )
    np.testing.assert_allclose(scores_of(backend, pack), pack.behavior_logprobs, atol=2e-5)
    assert backend.forward_backward(pack).means()["ratio_max"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}])
def test_what_was_drawn_from_another_distribution_is_not_trained_on(model_path, sampling):
    ((name, _),) = sampling.items()
    with pytest.raises(InvalidFieldError, match=rf"^prompt\.sampling\.{name}: "):
        training_samples(sampled(model_path, **sampling))
