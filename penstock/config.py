"""Configuration files: YAML in, one frozen pydantic model out, or one clear line per problem.

Unknown keys are refused with the nearest known name; dotted overrides (`a.b.c=value`) are read as YAML.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from penstock.names import RUN_ID_RULE, is_run_id
from penstock.targets import split_targets

MAX_CONFIG_BYTES = 1024 * 1024


class ConfigError(Exception):
    """A user's mistake in a configuration; the message is one line for each problem."""


class StrictModel(BaseModel):
    """Base of every configuration section: frozen, unknown keys refused, attribute docstrings as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """Annotates a section whose model depends on what it says: every key that it may have."""

    keys: Callable[[], Iterable[str]]


class NetworkConfig(StrictModel):
    """Base of the configuration of everything that listens or calls."""

    insecure: bool = False
    """Allow plain text where TLS is not set up: listeners that other machines reach, and tokens that anyone on the path
    can read. Use it only inside a private network, such as compose's."""


class MeasuredConfig(NetworkConfig):
    """Base of a service's configuration: where it serves Prometheus metrics, if anywhere."""

    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of 127.0.0.1 that serves Prometheus metrics; none when unset."""
    metrics_listen: str | None = Field(default=None, pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}$")
    """The same at host:port, for a Prometheus elsewhere; it shows an observer's token or certificate where this process
    has credentials."""

    @model_validator(mode="after")
    def _metrics_have_one_place(self) -> Self:
        if self.metrics_port is not None and self.metrics_listen is not None:
            raise ValueError("metrics_listen: has no effect with metrics_port; leave one of them out")
        if self.metrics_listen is not None and not 1 <= int(self.metrics_listen.rpartition(":")[2]) <= 65535:
            raise ValueError(f"metrics_listen: {self.metrics_listen} needs a port of 1 to 65535")
        return self

    @property
    def metrics_address(self) -> str | None:
        """Where metrics are served, host:port; None if they are not."""
        return f"127.0.0.1:{self.metrics_port}" if self.metrics_port is not None else self.metrics_listen


def _joined(value: Any) -> Any:
    return ",".join(str(item) for item in value) if isinstance(value, list | tuple) else value


def _checked(value: str) -> str:
    return ",".join(split_targets(value))


PUBLIC_ADDRESS = r"^(https?://\S+|(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5})$"
"""Address under which others reach an HTTP server: host:port, or a URL with its scheme."""


def _run_id(value: str) -> str:
    if not is_run_id(value):
        raise ValueError(f"must be {RUN_ID_RULE}")
    return value


RunId = Annotated[str, AfterValidator(_run_id)]
"""Name of a run: a single path component."""


def _path(value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        raise ValueError(
            f"{value!r:.200} is an address, but this has to be a path of the machine itself; name a folder of its disk"
        )
    return value


LocalPath = Annotated[Path, BeforeValidator(_path)]
"""A path of the machine that reads it; addresses, as of object storage, are refused."""

Targets = Annotated[str, BeforeValidator(_joined), AfterValidator(_checked)]
"""Interchangeable servers: host:port, several separated by commas or as a list."""

_Model = TypeVar("_Model", bound=BaseModel)
Document = dict[str, Any]


def read_document(path: Path) -> Document:
    """The mapping a YAML file holds; raises ConfigError naming the file, and the line where YAML is broken."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_CONFIG_BYTES} bytes; is this a configuration file?")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; name a file") from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; name a file of UTF-8 text") from error
    document = _read_yaml(text, source=str(path))
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must hold keys and values, found {type(document).__name__}")
    return document


def apply_overrides(document: Document, overrides: Iterable[str]) -> Document:
    """A copy of `document` with `a.b.c=value` settings applied, values read as YAML. Raises ConfigError."""
    result: Document = _copy(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise ConfigError(f"override {override!r}: write it as key.subkey=value")
        _set(result, keys, _read_yaml(text, source=f"override {override!r:.200}"), override)
    return result


def _read_yaml(text: str, *, source: str) -> Any:
    """What a text in YAML holds. Raises ConfigError."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not valid YAML: nested too deeply; close its brackets") from error
    except ValueError as error:
        # YAML takes 2026-13-01 for a date, and digits without end for a number.
        raise ConfigError(f"{source}: not valid YAML: {_one_line(error)}; quote what is text") from error


def validate(model: type[_Model], document: object, *, source: str) -> _Model:
    """`document` as a `model`; raises ConfigError with one line for each problem, naming key, value and fix."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{source}: {_describe(model, item)}" for item in error.errors())) from error


def _describe(model: type[BaseModel], item: Any) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
    key = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys here: {', '.join(sorted(known))}"
        return f"{key}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{key}: required, but not given"
    message = item["msg"].removeprefix("Value error, ")
    return f"{key}: {message} (got {item['input']!r:.200})" if key else message


def _known_keys(model: type[BaseModel], parents: list[str]) -> list[str]:
    current: type[BaseModel] | None = model
    known: list[str] = list(model.model_fields)
    for name in parents:
        if name.isdecimal():  # an element of a list, whose model was found with the list
            continue
        field = current.model_fields.get(name) if current else None
        current = _model_of(field.annotation) if field else None
        stated = [each for each in field.metadata if isinstance(each, KnownKeys)] if field else []
        known = list(stated[0].keys() if stated else current.model_fields if current else ())
    return known


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _model_of(part)) is not None), None)


def _set(document: Document, keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        child = document.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"override {override!r}: {key!r} is a value, not a section")
        document = child
    document[keys[-1]] = value


def _copy(value: Any) -> Any:
    return {key: _copy(child) for key, child in value.items()} if isinstance(value, dict) else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
