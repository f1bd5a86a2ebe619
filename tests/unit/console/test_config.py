"""The run configuration: what it accepts, refuses, resolves and derives."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from console.config.config import GeneratorSection, RunConfig, load_run_config, parse_run_config, resolve, to_yaml
from console.config.derive import (
    broker_config,
    critic_config,
    generator_config,
    local_endpoint,
    reward_config,
    scorer_config,
    trainer_config,
    trainer_roots,
    trainer_storage,
    training_config,
)
from console.config.run_folder import RunFolder
from console.launch.launcher import choose_addresses
from penstock.config import ConfigError
from penstock.targets import checked_address
from services.generator.engines.registry import ENGINES
from services.reward.config import RewardModelConfig
from tests.helpers.console import ROOT

MINIMAL: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}


def config(**sections: Any) -> RunConfig:
    return parse_run_config({**MINIMAL, **sections}, source="test")


def problem(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return str(caught.value)


def test_a_plain_string_names_the_reward_model() -> None:
    assert config(reward="numeric").reward.model == "numeric"
    assert config(reward={"model": "math", "timeout_s": 5}).reward.timeout_s == 5


@pytest.mark.parametrize("text", ["nowhere", "host:0", "host:70000", "a b:1", ":80", "host:"])
def test_what_is_no_address_is_refused(text: str) -> None:
    assert "must be host:port" in problem(endpoints={"broker": text})


def test_addresses_of_every_kind_are_accepted() -> None:
    for text in ("127.0.0.1:7301", "broker:7301", "[::1]:7301"):
        assert checked_address(text) == text
    assert checked_address("grpc://broker:7301") == "broker:7301"


def test_several_brokers_are_a_list_or_a_string() -> None:
    for value in (["a:1", "grpc://b:2"], "a:1, b:2"):
        assert config(endpoints={"broker": value}).endpoints.broker == "a:1,b:2"
    assert "must be host:port" in problem(endpoints={"broker": ["a:1", "b"]})
    assert "separated by commas" in problem(endpoints={"broker": []})


def test_models_data_and_checkpoints_may_be_in_object_storage_and_the_run_folder_may_not() -> None:
    storage = {"checkpoint_storage": "s3://bucket/runs/"}
    stated = config(model={"path": "s3://bucket/model"}, data={"train": "gs://bucket/rows.jsonl"}, run=storage)
    resolved = resolve(stated, now_s=0)
    assert resolved.model.path == "s3://bucket/model"
    assert resolved.data.train == "gs://bucket/rows.jsonl"
    assert resolved.run.checkpoint_storage == "s3://bucket/runs"
    assert parse_run_config(yaml.safe_load(to_yaml(resolved)), source="saved") == resolved
    assert RunConfig.model_validate_json(resolved.model_dump_json()) == resolved
    assert trainer_storage(resolved) == ("s3://bucket/model", "gs://bucket/rows.jsonl", "s3://bucket/runs")
    assert trainer_roots(resolved)[0] == Path("runs").absolute()
    assert "this has to be a path of the machine itself" in problem(run={"dir": "file:///runs"})
    assert "none of the known kinds" in problem(model={"path": "memory://model"})
    assert problem(model={"path": 3}) == "test: model.path: must be a path or an address (got 3)"
    assert "none of the known kinds" in problem(run={"checkpoint_storage": "runs"})


def test_a_context_too_small_for_the_samples_is_refused() -> None:
    line = problem(generator={"max_context_tokens": 100}, data={"train": "t", "max_prompt_tokens": 80})
    assert "generator.max_context_tokens: 100 is less than" in line
    assert "= 336" in line


def test_evaluation_without_data_is_refused() -> None:
    assert "run.eval_every_steps: has no effect without data.eval" in problem(run={"eval_every_steps": 5})


def test_a_run_without_generators_cannot_evaluate() -> None:
    line = problem(generator={"count": 0}, data={"train": "t", "eval": "e"})
    assert "generator.count: 0 leaves no generator" in line
    assert config(generator={"count": 0}).generator.count == 0


def test_what_is_recorded_is_named_by_its_format() -> None:
    assert "record: must be true, false, or a file that ends in .jsonl or .parquet" in problem(record="a.csv")
    assert config(record=True).record is True
    resolved = resolve(config(record="a.parquet"), now_s=0.0).record
    assert isinstance(resolved, Path)
    assert resolved.is_absolute()


def test_attached_generators_need_the_run_id() -> None:
    assert "run.id: required" in problem(endpoints={"generators": ["host:1"]})
    assert "run.id: required" in problem(endpoints={"generators": []})


def test_generators_that_connect_on_their_own_are_neither_started_nor_called() -> None:
    elsewhere = config(run={"id": "x"}, endpoints={"generators": []})
    assert not elsewhere.starts_generators
    assert choose_addresses(elsewhere).generators == ()


def test_an_absurd_step_is_refused() -> None:
    line = problem(algorithm={"prompts_per_step": 100_000, "group_size": 1024})
    assert "102400000 samples a step" in line


def test_a_redis_url_of_another_scheme_is_refused() -> None:
    assert "broker.redis_url" in problem(broker={"redis_url": "http://x"})


def test_resolving_names_the_run_and_makes_paths_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = resolve(config(), now_s=0.0)
    assert resolved.run.id == "run-19700101-000000"
    assert resolved.model.path == tmp_path / "m"
    assert resolved.data.train == tmp_path / "t.jsonl"
    assert resolved.run.dir == tmp_path / "runs"


def test_a_remote_trainers_paths_stay_as_they_are() -> None:
    resolved = resolve(config(endpoints={"trainer": "far:7304"}, run={"id": "x"}), now_s=0.0)
    assert resolved.model.path == Path("m")


@pytest.mark.parametrize("trainer", [None, "far:7304"])
def test_canaries_of_a_source_s_own_reward_are_found_from_any_folder(trainer: str | None) -> None:
    judged = {"model": "numeric", "canaries": {"path": "known.jsonl"}}
    held_out = [{"name": "b", "path": "b", "reward": judged}, {"name": "c", "path": "c", "reward": "math"}]
    data = {"train": [{"name": "a", "path": "a", "reward": judged}], "eval": held_out}
    stated = config(data=data, run={"id": "x"}, endpoints={"trainer": trainer})
    resolved = resolve(stated, now_s=0.0)
    found = {name: reward.canaries and reward.canaries.path for name, reward in resolved.source_rewards.items()}
    assert found == {"a": Path("known.jsonl").absolute(), "b": Path("known.jsonl").absolute(), "c": None}
    assert stated.source_rewards["a"].canaries.path == Path("known.jsonl")
    assert parse_run_config(yaml.safe_load(to_yaml(resolved)), source="saved") == resolved


def test_the_saved_yaml_reads_back_as_the_same_configuration(tmp_path: Path) -> None:
    original = config(optimizer={"learning_rate": 1e-7}, reward="math", endpoints={"broker": "b:1"})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(original))
    assert load_run_config(path) == original


def test_exponents_without_a_point_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {path: m}\ndata: {train: t}\noptimizer: {learning_rate: 4e-4}\n")
    assert load_run_config(path).optimizer.learning_rate == pytest.approx(4e-4)


def test_service_configurations_agree_on_addresses(tmp_path: Path) -> None:
    generator = {"count": 2, "engine": "emulated"}
    resolved = resolve(config(generator=generator, run={"seed": 5}, site="frankfurt"), now_s=0.0)
    addresses = choose_addresses(resolved)
    folder = RunFolder(tmp_path)
    generators = [generator_config(resolved, addresses, folder, index) for index in range(2)]
    assert {one.broker for one in generators} == {addresses.broker.target}
    assert generators[0].listen != generators[1].listen
    assert [one.seed for one in generators] == [5, 6]
    assert generators[0].weights == addresses.trainer.target
    assert generators[0].engine.engine == "emulated"
    assert {one.site for one in generators} == {"frankfurt"}
    reward = reward_config(resolved, addresses)
    assert broker_config(resolved, addresses, "unix:///x").listen == reward.broker
    # The reward worker decodes with the tokenizer that generators decode with.
    assert {reward.tokenizer_path} == {one.model_path for one in generators}
    assert addresses.weights_url == addresses.weights_listen


def test_a_scorer_computes_as_the_trainer_does_with_the_model_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    apart = {"kl_coefficient": 0.1, "reference": "service"}
    resolved = resolve(config(algorithm=apart, scorers=2, trainer={"tokens_per_pack": 77}), now_s=0.0)
    addresses = choose_addresses(resolved)
    found = [scorer_config(resolved, addresses, index) for index in range(2)]
    assert [(each.worker_id, each.tokens_per_pack, each.model_path) for each in found] == [
        ("scorer-0", 77, tmp_path / "m"),
        ("scorer-1", 77, tmp_path / "m"),
    ]
    assert found[0].listen != found[1].listen
    taught = resolve(config(algorithm=apart | {"name": "distill", "reference_path": "t"}), now_s=0.0)
    assert scorer_config(taught, choose_addresses(taught), 0).model_path == tmp_path / "t"
    assert choose_addresses(resolve(config(algorithm={"kl_coefficient": 0.1}), now_s=0.0)).scorers == ()
    assert "generator.openai_listen" in problem(algorithm=apart, generator={"openai_listen": "127.0.0.1:8000"})


def test_a_critic_is_started_beside_the_trainer_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    ppo = {"name": "ppo", "critic": "service"}
    resolved = resolve(config(algorithm=ppo, run={"checkpoint_every_steps": 7}), now_s=0.0)
    addresses = choose_addresses(resolved)
    assert addresses.critic is not None
    found = critic_config(resolved, addresses, RunFolder(tmp_path / "run"))
    assert (found.run_id, found.listen) == (resolved.run.id, addresses.critic.target)
    assert (found.checkpoint_every_steps, found.state_dir) == (7, tmp_path / "run" / "critic")
    sharded = config(run={"id": "r"}, algorithm=ppo, devices={"critic": [0, 1]})
    assert [found.processes, critic_config(sharded, addresses, RunFolder(tmp_path)).processes] == [1, 2]
    sent = training_config(resolved, broker="b:1", critic=addresses.critic.target, source="test")
    assert sent.critic == found.listen

    away = {"run": {"id": "r"}, "algorithm": ppo, "endpoints": {"critic": "far:7309"}}
    there = choose_addresses(resolve(config(**away), now_s=0.0)).critic
    assert there is not None
    assert (there.target, there.is_local) == ("far:7309", False)
    assert choose_addresses(resolve(config(algorithm={"name": "ppo"}), now_s=0.0)).critic is None
    assert "run.id: required with endpoints.critic" in problem(**(away | {"run": {}}))
    two = {"critic": ["far:7309", "near:7309"]}
    assert "endpoints.critic: names several places" in problem(**(away | {"endpoints": two}))
    assert "endpoints.critic: has no effect" in problem(**(away | {"algorithm": {"name": "ppo"}}))
    assert "endpoints.critic: required" in problem(algorithm=ppo, endpoints={"trainer": "far:7304"})


def test_agents_are_sampled_as_the_run_trains_and_each_generator_has_a_port_of_its_own(tmp_path: Path) -> None:
    agents = config(
        run={"id": "r"},
        generator={"count": 2, "openai_listen": "127.0.0.1:8000"},
        sampling={"temperature": 0.8},
        reward="grpc://judge:7310",
        data={"train": None},
    )
    addresses = choose_addresses(agents)
    made = [generator_config(agents, addresses, RunFolder(tmp_path), index).openai for index in range(2)]
    assert [one.listen for one in made] == ["127.0.0.1:8000", "127.0.0.1:8001"]
    assert {(one.temperature, one.reward) for one in made} == {(0.8, "grpc://judge:7310")}
    several = agents.model_copy(
        update={"reward": RewardModelConfig.model_validate([{"model": "grpc://judge:7310", "name": "a"}])}
    )
    assert generator_config(several, addresses, RunFolder(tmp_path), 0).openai.reward is None
    assert "must be host:port" in problem(generator={"openai_listen": "here"})


def test_listening_on_all_addresses_is_called_on_loopback() -> None:
    assert local_endpoint("0.0.0.0:7301").target == "127.0.0.1:7301"
    addresses = choose_addresses(config(listen={"weights": "0.0.0.0:7305", "public_host": "gpu-box"}))
    assert addresses.weights_url == "gpu-box:7305"


def test_what_the_trainer_would_refuse_is_refused_here() -> None:
    refused = config(algorithm={"max_staleness": 2, "correction": "none"})
    with pytest.raises(ConfigError, match="correction: 'none' is refused"):
        training_config(refused, broker="b:1", source="c.yaml")


def test_every_field_is_described() -> None:
    undescribed = [f"{model.__name__}.{name}" for model, name, field in every_field() if not field.description]
    assert undescribed == []


def test_the_number_of_fields_stays_within_the_budget() -> None:
    assert len([name for model, name, _ in every_field() if model is not RunConfig]) <= 162


ENGINE_VALUES = {
    "vllm": {"kv_cache_gib": 0.25, "gpu_memory_utilization": 0.5, "pipeline_parallel": 2},
    "transformers": {"num_threads": 3},
    "emulated": {"emulated_tokens_per_second": 10.0, "emulated_mean_tokens": 9},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_takes_its_own_keys_beside_those_of_the_section(engine: str, tmp_path: Path) -> None:
    made = config(generator={"engine": engine, "count": 2, "max_concurrent_samples": 5, **ENGINE_VALUES[engine]})
    assert parse_run_config(yaml.safe_load(to_yaml(made)), source="again") == made
    resolved = resolve(made, now_s=0.0)
    derived = generator_config(resolved, choose_addresses(resolved), RunFolder(tmp_path), 1).engine
    assert type(derived) is ENGINES[engine]
    assert derived.model_dump() == derived.model_dump() | {
        "engine": engine,
        "max_concurrent_samples": 5,
        **ENGINE_VALUES[engine],
    }


def test_keys_of_another_engine_have_no_effect_but_have_to_be_right() -> None:
    others = {key: value for engine in ("vllm", "emulated") for key, value in ENGINE_VALUES[engine].items()}
    made = config(generator={**others, "engine": "transformers", "pipeline_parallel": 1})
    assert made.generator == config(generator={"engine": "transformers"}).generator
    assert "generator.kv_cache_gib: Input should be greater than 0 (got -1)" in problem(
        generator={"engine": "emulated", "kv_cache_gib": -1}
    )


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"engine": "vlm"}, "generator.engine: must be one of vllm, transformers, emulated (got 'vlm')"),
        ({"engine": ["vllm"]}, "generator.engine: must be one of vllm, transformers, emulated (got ['vllm'])"),
        ({"kv_cache_gb": 1}, "generator.kv_cache_gb: unknown key; did you mean 'kv_cache_gib'?"),
        ({"engine": "emulated", "cuont": 1}, "generator.cuont: unknown key; did you mean 'count'?"),
        ({"engine": "transformers", "pipeline_parallel": 2}, "2 stages need the vllm engine, not transformers"),
    ],
)
def test_a_mistake_about_the_engine_names_the_key_and_the_fix(section: dict[str, Any], words: str) -> None:
    assert words in problem(generator=section)


@pytest.mark.parametrize("name", ["quickstart.yaml", "own_task.yaml"])
def test_examples_are_valid(name: str) -> None:
    path = ROOT / "examples" / name
    assert load_run_config(path).model.path
    assert set(yaml.safe_load(path.read_text())) <= set(RunConfig.model_fields)


def every_field() -> list[tuple[type[BaseModel], str, Any]]:
    """Those of a run, with the keys of every engine."""
    of_engines = [
        (kind, name, field)
        for kind in ENGINES.values()
        for name, field in kind.model_fields.items()
        if name not in GeneratorSection.model_fields
    ]
    return [*fields(RunConfig), *of_engines]


def fields(model: type[BaseModel]) -> list[tuple[type[BaseModel], str, Any]]:
    found = []
    for name, field in model.model_fields.items():
        found.append((model, name, field))
        if inspect.isclass(field.annotation) and issubclass(field.annotation, BaseModel):
            found += fields(field.annotation)
    return found


@pytest.mark.parametrize("run_id", [".", "..", "...", "a/b", "x" * 65, "../up"])
def test_a_run_id_that_is_no_plain_name_is_refused(run_id: str) -> None:
    assert "run.id: must be 1 to 64 characters" in problem(run={"id": run_id})


def test_a_trainer_that_is_started_here_may_use_what_the_run_names_and_nothing_else() -> None:
    resolved = resolve(
        config(run={"id": "a", "dir": "/r"}, model={"path": "/m"}, data={"train": "/t.jsonl"}), now_s=0.0
    )
    made = trainer_config(resolved, choose_addresses(resolved))
    assert [str(path) for path in made.allowed_roots] == ["/r", "/r/a", "/r/a/checkpoints", "/m", "/t.jsonl"]


def test_relays_that_the_run_trusts_reach_the_trainer_and_nonsense_is_refused() -> None:
    trusting = config(weights={"trusted_relay_hosts": ["10.0.0.0/8", ".site.example"]})
    assert trainer_config(trusting, choose_addresses(trusting)).trusted_relay_hosts == ("10.0.0.0/8", ".site.example")
    assert "name a host" in problem(weights={"trusted_relay_hosts": ["http://gpu-1"]})


def test_an_environment_reaches_generators_and_trainer(tmp_path: Path) -> None:
    run = config(run={"id": "r"}, environment={"target": "games:Guess", "max_turns": 3}, generator={"count": 2})
    addresses = choose_addresses(run)
    assert addresses.environment is not None
    assert addresses.environment.is_local
    made = [generator_config(run, addresses, RunFolder(tmp_path), index).environment for index in range(2)]
    assert {(one.target, one.max_turns) for one in made if one} == {(f"grpc://{addresses.environment.target}", 3)}
    document = training_config(run, broker="b:1", source="c.yaml", environment=addresses.environment)
    assert document.environment == addresses.environment.target
    elsewhere = choose_addresses(config(environment="grpc://games:7320")).environment
    assert elsewhere is not None
    assert (elsewhere.target, elsewhere.is_local) == ("games:7320", False)
    without = config(run={"id": "r"})
    assert generator_config(without, choose_addresses(without), RunFolder(tmp_path), 0).environment is None


def test_an_environment_out_of_reach_is_refused() -> None:
    assert "module:Class" in problem(environment="games")
    assert "host:port" in problem(environment="grpc://games")
    assert "penstock env serve" in problem(environment="games:Guess", endpoints={"trainer": "t:7304"})
    elsewhere = {"environment": "games:Guess", "run": {"id": "r"}, "endpoints": {"generators": ["g:1"]}}
    assert "generators elsewhere cannot reach it; set listen.environment" in problem(**elsewhere)
    slow = {"target": "games:Guess", "step_timeout_s": 300}
    line = problem(environment=slow)
    assert "environment.step_timeout_s: 300 is not below trainer.max_lease_silence_s, 300" in line
    assert config(environment=slow, trainer={"max_lease_silence_s": 301}).environment is not None
    listen = {"environment": "0.0.0.0:7302", "public_host": "head"}
    for planned in ({"endpoints": {"trainer": "t:7304"}}, {"scheduler": {"problem": "p.yaml"}, "run": {"id": "r"}}):
        found = choose_addresses(config(environment="games:Guess", listen=listen, **planned)).environment
        assert found is not None
        assert (found.target, found.listen) == ("head:7302", "0.0.0.0:7302")
