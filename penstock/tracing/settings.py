"""A process's tracing settings: environment variables, with OpenTelemetry's own names where they exist."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.config import ConfigError

FOLDER_VARIABLE = "PENSTOCK_TRACE_DIR"
"""Folder of the trace files; unset, spans are only exported."""
RATIO_VARIABLE = "OTEL_TRACES_SAMPLER_ARG"
"""Share of groups that are sampled."""
OFF_VARIABLE = "OTEL_SDK_DISABLED"
ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
GRPC, HTTP = "grpc", "http/protobuf"
PROTOCOLS = (GRPC, HTTP)
CERTIFICATE_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE")
"""File with the authority of the collector's certificate."""
HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
"""What a collector is shown, name=value with commas; a secret."""
RUN_VARIABLE = "PENSTOCK_TRACE_RUN"
"""The run of a process that is started for one, if its configuration does not name it."""
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
    exports = bool(endpoint_of(environment))
    if exports and (protocol := protocol_of(environment)) not in PROTOCOLS:
        raise ConfigError(f"{PROTOCOL_VARIABLES[1]}: {protocol!r}: write one of {', '.join(PROTOCOLS)}")
    for name in CERTIFICATE_VARIABLES if exports else ():
        if (path := environment.get(name)) and not Path(path).is_file():
            raise ConfigError(f"{name}: {path}: is no file; name the one with the authority of the collector")
    folder = environment.get(FOLDER_VARIABLE)
    return TraceSettings(folder=Path(folder) if folder else None, exports=exports, ratio=_ratio(environment))


def endpoint_of(environment: Mapping[str, str] = os.environ) -> str:
    """The collector to which spans are exported; empty if there is none."""
    return next(filter(None, map(environment.get, ENDPOINT_VARIABLES)), "")


def protocol_of(environment: Mapping[str, str] = os.environ) -> str:
    """The protocol of OTLP by which they are exported."""
    return next(filter(None, map(environment.get, PROTOCOL_VARIABLES)), GRPC)


def collector_problem() -> str:
    """Why the collector of the environment takes no spans, in words; empty if it does. Takes some seconds at most."""
    try:
        settings_from()
    except ConfigError as error:
        return str(error)
    # Half a second of imports.
    from penstock.tracing.export.collector import probe

    return probe()


def checked_endpoint(url: str, *, protocol: str = GRPC) -> str:
    """An endpoint that a configuration names. Raises ValueError: it is none, or has a secret in it.

    Args:
        url: http or https; over HTTP it may have a path, to which /v1/traces is added.
        protocol: By which spans are exported.
    """
    is_http = protocol == HTTP
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is not None or is_http)
    except ValueError:
        is_address = False
    if not is_address or (parts.path.strip("/") and not is_http) or parts.query or parts.fragment:
        where = "HOST[:PORT][/PATH]" if is_http else "HOST:PORT"
        hint = "" if is_http else f"; one of OTLP over HTTP needs otlp_protocol {HTTP}"
        raise ValueError(f"{url.rpartition('@')[2]!r}: write http://{where}, or https://{where}, of a collector{hint}")
    if "@" in parts.netloc:
        raise ValueError(f"a configuration is no place for a secret: set {HEADERS_VARIABLE} instead")
    return url


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
