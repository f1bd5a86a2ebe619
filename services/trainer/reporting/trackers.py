"""Sends a run's metrics to trackers besides metrics.jsonl: TensorBoard's files, Weights & Biases.

Promises:

- metrics.jsonl has every number, whatever happens to a tracker: one that fails is logged and left out from then on.
- A configured tracker that cannot start (not installed, no key) is refused before training starts.
- Names and values are those of metrics.jsonl and, as `eval/...`, of evaluations.jsonl; the step is the policy version.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import structlog

from penstock.config import ConfigError
from penstock.security.plain_text import is_local
from services.trainer.run_sections import TRACKER_PACKAGES, TrackerName

_log = structlog.get_logger()
Numbers = Mapping[str, float]
_WANDB_ADDRESS = "WANDB_BASE_URL"


class Tracker(NamedTuple):
    """Receives the numbers of a run."""

    log: Callable[[Numbers, int], None]
    """Records the numbers of a policy version; called in order of versions, for some more than once."""
    close: Callable[[], None]
    """Flushes unwritten values."""


def _tensorboard(directory: Path, *, policy_version: int) -> Tracker:
    """Event files in a folder; steps after `policy_version`, which a resumed run abandoned, are no longer shown."""
    module = importlib.import_module("torch.utils.tensorboard")
    writer: Any = module.SummaryWriter(str(directory), purge_step=policy_version + 1)

    def log(numbers: Numbers, version: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, version)

    return Tracker(log=log, close=writer.close)


def _wandb(directory: Path, *, run_id: str, is_offline: bool, document: Mapping[str, Any]) -> Tracker:
    """A run of the same id at W&B, or, offline, in a folder that `wandb sync` uploads.

    A resumed run continues in the same one; W&B keeps its values of steps that are trained again.
    """
    wandb: Any = importlib.import_module("wandb")
    run: Any = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "penstock"),
        id=run_id,
        name=run_id,
        dir=str(directory),
        config=dict(document),
        mode="offline" if is_offline else "online",
        resume="allow",
        settings=wandb.Settings(silent=True, console="off"),
    )
    return Tracker(log=lambda numbers, version: run.log(dict(numbers), step=version), close=run.finish)


class Trackers:
    """All trackers of a run."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def log(self, numbers: Numbers, *, policy_version: int) -> None:
        """Pass numbers on; never raises."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(numbers, policy_version)
            except Exception as error:  # If a tracker fails, training continues without it.
                _log.error("a tracker failed and is left out from now on", tracker=name, error=str(error))
                del self._trackers[name]

    def close(self) -> None:
        """Close all trackers; never raises."""
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # The same.
                _log.error("a tracker could not be ended", tracker=name, error=str(error))
        self._trackers = {}


def open_trackers(
    names: Sequence[TrackerName],
    run_dir: Path,
    *,
    run_id: str,
    policy_version: int,
    document: Mapping[str, Any],
    allows_plain: bool = False,
) -> Trackers:
    """Open all of `names` for a run at `policy_version`; blocks for seconds if one is online.

    None sees any credential of Penstock. With `allows_plain` a tracker's own key may be sent in plain text.

    Raises:
        ConfigError: One is not installed, could not begin, or would be sent its key in plain text.
    """
    if "wandb" in names and not allows_plain:
        _check_address(_WANDB_ADDRESS)
    opened: dict[str, Tracker] = {}
    for name in names:
        try:
            match name:
                case "tensorboard":
                    opened[name] = _tensorboard(run_dir / "tensorboard", policy_version=policy_version)
                case "wandb" | "wandb_offline":
                    offline = name == "wandb_offline"
                    opened[name] = _wandb(run_dir, run_id=run_id, is_offline=offline, document=document)
        except Exception as error:  # Third-party errors of any kind are reported to the user.
            Trackers(opened).close()
            is_missing = isinstance(error, ModuleNotFoundError)
            fix = f"pip install {TRACKER_PACKAGES[name]}, or leave it out" if is_missing else str(error)
            raise ConfigError(f"run.trackers: {name} cannot begin: {fix}") from error
    return Trackers(opened)


def _check_address(variable: str) -> None:
    """Raises ConfigError if a key would go to another machine in plain text."""
    address = os.environ.get(variable, "")
    parts = urlsplit(address)
    if parts.scheme == "http" and not is_local(f"{parts.hostname}:{parts.port or 80}"):
        raise ConfigError(
            f"run.trackers: {variable} is {address}, where the key would go in plain text; use https, or set "
            "insecure: true in the trainer's configuration"
        )
