"""What passes without gradient find belongs to the trajectories that were asked about."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.step.prior_passes import Scoring
from tests.unit.trainer.builders import RecordingBackend, build_trajectory


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60), max_size=20),
    shares=st.lists(st.sampled_from([1.0, 2.0, 3.5]), min_size=1, max_size=4),
)
def test_every_trajectory_gets_its_own_scores_from_any_number_of_processes(lengths, shares):
    rng = np.random.default_rng(0)
    trajectories = [build_trajectory(rng, num_prompt=1, num_completion=length - 1) for length in lengths]
    backend = RecordingBackend()
    backend.shares = tuple(shares)
    found = Scoring(backend, max_pack_tokens=64, check=lambda: None).of(trajectories, ["values", "reference_logprobs"])
    assert len(found) == len(trajectories)
    for trajectory, scores in zip(trajectories, found, strict=True):
        tokens = trajectory.token_ids[trajectory.loss_mask].astype(np.float32)
        np.testing.assert_array_equal(scores["values"], tokens / 100)
        np.testing.assert_array_equal(scores["reference_logprobs"], -tokens / 1000)


def test_without_a_quantity_no_pass_is_made():
    def check():
        pytest.fail("a pass is about to be made")

    trajectory = build_trajectory(np.random.default_rng(0), num_prompt=1, num_completion=3)
    assert Scoring(RecordingBackend(), max_pack_tokens=64, check=check).of([trajectory], []) == [{}]
