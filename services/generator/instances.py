"""The generators of one process: a configuration for each. Pure."""

from __future__ import annotations

from services.generator.config import GeneratorConfig


def expand(config: GeneratorConfig) -> list[GeneratorConfig]:
    """One configuration for each generator; the given one if it names no instances.

    All have the seed of the process, so that each can continue another's samples.
    """
    if not config.instances:
        return [config]
    expanded: list[GeneratorConfig] = []
    for instance in config.instances:
        own = {name: value for name in _OWN if (value := getattr(instance, name)) is not None}
        for _ in range(instance.count):
            index = len(expanded)
            place = {
                "instances": (),
                "listen": _listen(config.listen, index),
                "generator_id": f"{config.generator_id}-{index}",
            }
            expanded.append(config.model_copy(update={**own, **place}))
    return expanded


_OWN = ("run_id", "site", "engine", "emulated")


def _listen(first: str, index: int) -> str:
    """The address of generator `index`; port 0 is any free one for each."""
    host, _, port = first.rpartition(":")
    return first if port == "0" else f"{host}:{int(port) + index}"
