"""Several emulated generators in one process: what each is configured as."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import ConfigError, read_document, validate
from services.generator.config import GeneratorConfig
from services.generator.engines.emulated.from_config import build_spec
from services.generator.instances import expand


def config(**rest: object) -> GeneratorConfig:
    document = {"run_id": "r", "model_path": "m", "cache_dir": "c", "engine": {"engine": "emulated"}, **rest}
    return validate(GeneratorConfig, document, source="c.yaml")


def test_without_instances_a_process_is_one_generator() -> None:
    assert expand(config()) == [config()]


def test_instances_have_their_own_address_and_name_and_share_the_rest() -> None:
    fleet = config(
        listen="0.0.0.0:7400",
        generator_id="lab",
        seed=3,
        instances=[
            {"count": 2, "emulated": {"gpu": "H800"}},
            {"run_id": "s", "site": "far", "engine": {"engine": "emulated", "max_concurrent_samples": 8}},
        ],
    )
    first, second, third = expand(fleet)
    assert [one.listen for one in (first, second, third)] == ["0.0.0.0:7400", "0.0.0.0:7401", "0.0.0.0:7402"]
    assert [one.generator_id for one in (first, second, third)] == ["lab-0", "lab-1", "lab-2"]
    assert (first.emulated.gpu, third.emulated.gpu) == ("H800", None)
    assert (second.run_id, third.run_id) == ("r", "s")
    assert (second.site, third.site) == ("", "far")
    assert (second.engine.max_concurrent_samples, third.engine.max_concurrent_samples) == (128, 8)
    assert {one.seed for one in (first, second, third)} == {3}
    assert not any(one.instances for one in (first, second, third))
    assert all(one.model_path == Path("m") for one in (first, second, third))


def test_free_ports_are_free_for_each() -> None:
    assert {one.listen for one in expand(config(listen="127.0.0.1:0", instances=[{"count": 5}]))} == {"127.0.0.1:0"}


@pytest.mark.parametrize(
    ("rest", "complaint"),
    [
        ({"engine": {"engine": "vllm"}, "instances": [{}]}, "vllm engines need a process each"),
        ({"instances": [{"count": 200}, {"count": 100}]}, "at most 256"),
    ],
)
def test_what_cannot_share_a_process_is_refused(rest: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        config(**rest)


def test_the_example_of_an_emulated_fleet_can_be_built() -> None:
    path = Path(__file__).parents[3] / "examples" / "pretend_fleet.yaml"
    members = expand(validate(GeneratorConfig, read_document(path), source=str(path)))
    specs = [build_spec(one.engine, one) for one in members]
    assert len(specs) == 7
    assert len({one.generator_id for one in members}) == 7
    h800, l40s = specs[0], specs[4]
    assert l40s.steps.step_s(1, 0) > 3 * h800.steps.step_s(1, 0)
