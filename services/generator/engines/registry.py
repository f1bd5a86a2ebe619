"""Maps configuration names to engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, SerializeAsAny, ValidationError
from pydantic_core import PydanticCustomError

from penstock.config import KnownKeys
from services.generator.engines.base_config import BaseEngineConfig
from services.generator.engines.emulated.config import EmulatedEngineConfig
from services.generator.engines.transformers.config import TransformersEngineConfig
from services.generator.engines.vllm.config import VllmEngineConfig

DEFAULT_ENGINE = VllmEngineConfig()
ENGINES: dict[str, type[BaseEngineConfig]] = {
    "vllm": VllmEngineConfig,
    "transformers": TransformersEngineConfig,
    "emulated": EmulatedEngineConfig,
}


def engine_keys() -> set[str]:
    """Every key that any engine takes."""
    return {key for each in ENGINES.values() for key in each.model_fields}


def check_recorder(engine: BaseEngineConfig, *, field: str) -> None:
    """Raise ValueError unless the engine can record routes; `field` is the setting that asks for them."""
    if not engine.can_record_routes:
        others = ", ".join(name for name, each in ENGINES.items() if each.can_record_routes)
        raise ValueError(f"{field}: engine {engine.engine} cannot record routes; choose {others}, or set it to false")
    if engine.pipeline_parallel > 1:
        stages = f"pipeline_parallel {engine.pipeline_parallel}"
        raise ValueError(f"{field}: an engine of {stages} cannot record routes; leave that 1, or set this to false")


def split_engine(document: Mapping[str, Any]) -> tuple[type[BaseEngineConfig], dict[str, Any]]:
    """The class that a document's `engine` names, and the document without keys that only other engines take.

    Those have no effect, so that one key switches the engine; they are validated nevertheless. Raises
    ValidationError.
    """
    name = document.get("engine", DEFAULT_ENGINE.engine)
    if not isinstance(name, str) or name not in ENGINES:
        fault = PydanticCustomError("engine", "must be one of {names}", {"names": ", ".join(ENGINES)})
        raise ValidationError.from_exception_data("engine", [{"type": fault, "loc": ("engine",), "input": name}])
    kind = ENGINES[name]
    for other in ENGINES.values():
        if foreign := (document.keys() & other.model_fields.keys()) - kind.model_fields.keys():
            other.model_validate({key: document[key] for key in foreign})
            document = {key: value for key, value in document.items() if key not in foreign}
    return kind, dict(document)


def _read(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    kind, document = split_engine(value)
    return kind.model_validate(document)


EngineConfig = Annotated[SerializeAsAny[BaseEngineConfig], BeforeValidator(_read), KnownKeys(engine_keys)]
"""The configuration of any engine: a union discriminated by `engine`, over all of `ENGINES`."""
