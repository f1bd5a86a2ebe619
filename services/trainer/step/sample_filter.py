"""Which samples a step trains on.

A sample is trained on only if it is scored, well formed, within the staleness bound and its group is new to the step;
every skipped sample is reported with its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from services.trainer.batches.training_sample import TrainingSample, is_well_formed
from services.trainer.model.backend import StepBackend
from services.trainer.step.step_settings import StepSettings


class SkipReason(StrEnum):
    """Why a sample was not trained on."""

    UNSCORED = "unscored"
    STALE = "stale"
    MALFORMED = "malformed"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedSample:
    """A sample that was left out."""

    group_id: str
    sample_index: int
    reason: SkipReason


class SampleFilter:
    """Selects the samples of one step."""

    def __init__(self, backend: StepBackend, settings: StepSettings) -> None:
        self._backend = backend
        self._settings = settings
        self.group_ids: set[str] = set()
        """Groups seen so far, those without a trained sample included."""
        self.skipped: list[SkippedSample] = []

    def usable(self, group: Sequence[TrainingSample], *, is_replayed: bool) -> list[TrainingSample]:
        """The samples of one group that can be trained on; the others are added to `skipped`."""
        if not group:
            return []
        group_id = group[0].group_id
        is_duplicate = group_id in self.group_ids
        self.group_ids.add(group_id)
        usable: list[TrainingSample] = []
        for sample in group:
            reason = SkipReason.DUPLICATE if is_duplicate else self._skip_reason(sample, group_id, usable)
            if is_replayed and reason is SkipReason.STALE:
                reason = None
            if reason is None:
                usable.append(sample)
            else:
                self.skipped.append(
                    SkippedSample(group_id=sample.group_id, sample_index=sample.sample_index, reason=reason)
                )
        return usable

    def _skip_reason(
        self, sample: TrainingSample, group_id: str, siblings: Sequence[TrainingSample]
    ) -> SkipReason | None:
        if sample.reward is None:
            return SkipReason.UNSCORED
        is_incomplete = self._settings.brings_reference and sample.reference_logprobs is None
        if is_incomplete or sample.group_id != group_id or not is_well_formed(sample, self._backend.vocab_size):
            return SkipReason.MALFORMED
        if any(sample.sample_index == sibling.sample_index for sibling in siblings):
            return SkipReason.DUPLICATE
        if sample.prompt_token_ids.size + sample.completion_token_ids.size > self._backend.max_sequence_length:
            return SkipReason.TOO_LONG
        if self._settings.policy_version - int(sample.policy_versions.min()) > self._settings.max_staleness:
            return SkipReason.STALE
        return None
