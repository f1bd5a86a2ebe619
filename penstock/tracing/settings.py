"""What a process is told about tracing: by the environment, in OpenTelemetry's own names where there are such."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config import ConfigError

FOLDER_VARIABLE = "PENSTOCK_TRACE_DIR"
"""Folder of the trace files; unset, spans are only exported."""
RATIO_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
"""Share of groups that are sampled."""
OFF_VARIABLE = "OTEL_SDK_DISABLED"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
RUN_VARIABLE = "PENSTOCK_TRACE_RUN"
"""The run of a process that is started for one, and is not told by its configuration."""
RUN_ATTRIBUTE = "rl.run.id"
"""Attribute of the resource: the run that spans belong to."""
DEFAULT_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Where spans go, and how many groups are sampled; off if they go nowhere."""

    folder: Path | None = None
    """Of the trace files."""
    exports: bool = False
    """Whether to export by OTLP, as OpenTelemetry's variables say."""
    ratio: float = DEFAULT_RATIO
    """Share of groups that are sampled when they are submitted, 0 to 1."""

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""
        return self.exports or self.folder is not None


def settings_from(environment: Mapping[str, str] = os.environ) -> TraceSettings:
    """The settings in the environment. Raises ConfigError."""
    if environment.get(OFF_VARIABLE, "").lower() == "true":
        return TraceSettings()
    exports = any(environment.get(name) for name in ENDPOINT_VARIABLES)
    protocol = next(filter(None, map(environment.get, PROTOCOL_VARIABLES)), "grpc")
    if exports and protocol != "grpc":
        raise ConfigError(f"{PROTOCOL_VARIABLES[1]}: {protocol!r}: spans are exported by grpc only; unset it")
    folder = environment.get(FOLDER_VARIABLE)
    return TraceSettings(folder=Path(folder) if folder else None, exports=exports, ratio=_ratio(environment))


def run_of(environment: Mapping[str, str] = os.environ) -> str:
    """The run that the process's launcher says it serves; empty if none."""
    return environment.get(RUN_VARIABLE, "")


def _ratio(environment: Mapping[str, str]) -> float:
    text = environment.get(RATIO_VARIABLE) or str(DEFAULT_RATIO)
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"{RATIO_VARIABLE}: {text!r}: write a share of groups, from 0 to 1")
    return ratio
