"""Replaying must tell a right version from a wrong one, and a kept cache from a recomputed one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.generator import suite
from benchmarks.generator.model import make_model
from benchmarks.generator.replay import Replayer
from services.generator.engine.engine import UpdateMode

PROMPT = [5, 9, 33, 2]
TOKENS = [7, 8, 40, 21, 3, 60, 11, 12]
VERSIONS = [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    files = make_model(directory, num_versions=3)
    return directory, {version: str(file) for version, file in enumerate(files)}


def whole(replayer, version):
    """Log-probs of all tokens under one version, in one pass."""
    with torch.inference_mode():
        logits = replayer._models[version](input_ids=torch.tensor([PROMPT + TOKENS])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS).unsqueeze(1)).squeeze(1).numpy()


def test_recomputed_caches_give_what_each_version_gives_alone(made):
    replayer = Replayer(*made, recomputed=frozenset({1, 2}))
    expected = [whole(replayer, version)[index] for index, version in enumerate(VERSIONS)]
    np.testing.assert_allclose(replayer.replayed(PROMPT, TOKENS, VERSIONS), expected, atol=1e-5)
    np.testing.assert_allclose(replayer.fresh(PROMPT, TOKENS, VERSIONS), expected, atol=1e-5)


def test_kept_caches_give_something_else_after_an_update_only(made):
    replayer = Replayer(*made, recomputed=frozenset())
    kept, fresh = (of(PROMPT, TOKENS, VERSIONS) for of in (replayer.replayed, replayer.fresh))
    np.testing.assert_allclose(kept[:3], fresh[:3], atol=1e-5)
    assert (np.abs(kept - fresh)[3:] > 1e-4).all()


def test_a_cache_recomputed_midway_drops_the_earlier_entries(made):
    replayer = Replayer(*made, recomputed=frozenset({2}))
    found, fresh = (of(PROMPT, TOKENS, VERSIONS) for of in (replayer.replayed, replayer.fresh))
    assert (np.abs(found - fresh)[3:6] > 1e-4).all()
    np.testing.assert_allclose(found[6:], fresh[6:], atol=1e-5)


def test_a_wrong_version_and_a_lost_sample_show(made):
    directory, files = made
    replayer = Replayer(directory, files, recomputed=frozenset({1}))
    true = {"prompt": PROMPT, "num_asked": 8, "token_ids": TOKENS, "finish_reason": "length"}
    right = [0, 0, 0, 1, 1, 1, 1, 1]
    true |= {"versions": right, "logprobs": replayer.replayed(PROMPT, TOKENS, right).tolist()}
    wrong = true | {"versions": [0, 0, 0, 0, 1, 1, 1, 1]}
    cut = true | {"num_asked": 9}
    document = {"modes": {"1": "recompute"}, "version_files": files, "samples": [true]}
    judge = lambda *samples: suite._replay(directory, [document | {"samples": samples}], UpdateMode.RECOMPUTE, 10)  # noqa: E731
    assert judge(true)["max_logprob_difference"] < 1e-5
    assert judge(true)["num_lost"] == 0
    assert judge(true, wrong)["max_logprob_difference"] > 1e-3
    assert judge(true, cut)["num_lost"] == 1
