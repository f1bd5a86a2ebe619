"""Reads recorded samples (docs/recording.md, JSON lines) as the trainer gets them: by step, in whole groups."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.batches.training_sample import TrainingSample

Groups = Sequence[Sequence[TrainingSample]]


def read_steps(path: Path) -> list[Groups]:
    """The groups of each optimiser step, oldest step first."""
    steps: dict[int, dict[str, list[TrainingSample]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            groups = steps.setdefault(row["policy_version"], {})
            groups.setdefault(row["group_id"], []).append(_sample(row))
    return [list(steps[version].values()) for version in sorted(steps)]


def _sample(row: Mapping[str, Any]) -> TrainingSample:
    return TrainingSample(
        group_id=row["group_id"],
        sample_index=row["sample_index"],
        prompt_token_ids=np.array(row["prompt_token_ids"], dtype=np.int32),
        completion_token_ids=np.array(row["token_ids"], dtype=np.int32),
        behavior_logprobs=np.array(row["logprobs"], dtype=np.float32),
        policy_versions=np.repeat(np.array(row["versions"], dtype=np.int64), row["version_lengths"]),
        temperature=row["sampling"]["temperature"] or 1.0,
        reward=row["score"]["value"],
    )
