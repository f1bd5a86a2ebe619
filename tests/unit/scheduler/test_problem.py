import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from penstock.config import ConfigError, validate
from services.scheduler.problem.plan_document import node_classes
from services.scheduler.problem.problem import Problem, parse_problem, read_problem
from tests.helpers.plans.problems import INSTANCES, document

MODEL = "model.safetensors"


def test_a_problem_reads_the_same_from_json_and_from_yaml(tmp_path):
    as_yaml = tmp_path / "problem.yaml"
    as_yaml.write_text((INSTANCES / "tiny_04.json").read_text())

    assert read_problem(INSTANCES / "tiny_04.json") == read_problem(as_yaml)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["workload.stalenes=1"], "workload.stalenes: unknown key; did you mean 'staleness'?"),
        (["model.params=-1"], "model.params: Input should be greater than 0 (got -1)"),
        (["workload.prompt_len=1e300"], "workload.prompt_len: Input should be less than or equal to 1000000000000000"),
        (["cost_model.eta_bw=1e-300"], "cost_model.eta_bw: Input should be greater than or equal to 0.000001"),
        (["model.params=5e8"], "model: params: 5e+08; must be more than the 6.2233e+08 of the input embedding"),
        (["workload.output_len={type: gamma}"], "workload.output_len: Input tag 'gamma'"),
        (["gpu_types={L4: {tflops_bf16: 1, hbm_GB: 1, hbm_GBps: 1, ar_bus_GBps: 1}}"], "nodes.0.gpu: 'A100-80'"),
        (["links=[{a: r0, b: moon, bw_Gbps: 1}]"], "links.0.b: no node is in region 'moon'"),
        (["cost_model.mfu_train={H800: 0.4}"], "cost_model.mfu_train: needs the key 'default'"),
        (["constraints.gen_pp=0"], "constraints.gen_pp: Input should be greater than or equal to 1"),
    ],
)
def test_errors_name_the_field_and_the_value(overrides, message):
    with pytest.raises(ConfigError) as caught:
        validate(Problem, document("tiny_04", *overrides), source="problem")

    assert message in str(caught.value)


def test_machines_have_the_names_that_an_entry_gives_them():
    entry = {"name": "a", "gpu": "A100-80", "gpus": 8, "count": 2}
    named = {**entry, "name": "b", "count": 1, "machines": ["gpu-7.example"]}
    stated = {**document("tiny_04"), "links": []}
    problem = validate(Problem, {**stated, "nodes": [entry, named]}, source="problem")
    assert list(node_classes(problem)) == ["a-0", "a-1", "gpu-7.example"]
    for change, message in (
        ({"machines": ["gpu-7.example", "gpu-8.example"]}, "nodes.1.machines: names 2 machines, and count is 1"),
        ({"machines": ["a-1"]}, "nodes: 'a-1' is the name of 2 machines"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(Problem, {**stated, "nodes": [entry, {**named, **change}]}, source="problem")


def test_two_node_entries_of_one_name_are_refused():
    twice = document("tiny_04")
    twice["nodes"][1]["name"] = "a100"

    with pytest.raises(ConfigError, match=r"nodes\.1\.name: 'a100' is used twice"):
        parse_problem(json.dumps(twice), source="problem")


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_malformed_problem_is_one_clear_line(text):
    with pytest.raises(ConfigError, match=r"^problem: ") as caught:
        parse_problem(text, source="problem")

    assert len(str(caught.value).splitlines()) == 1


def test_constants_that_are_not_given_are_those_of_the_reference_model():
    without = {key: value for key, value in document("tiny_04").items() if key != "cost_model"}

    assert (
        parse_problem(json.dumps(without), source="p").cost_model == read_problem(INSTANCES / "tiny_04.json").cost_model
    )


def test_a_problem_names_the_folder_of_its_model(tmp_path):
    save_file({"model.embed": np.zeros((32, 8), np.float16), "gate": np.zeros((4, 100), np.float16)}, tmp_path / MODEL)
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes | {"num_attention_heads": 4}))
    stated = document("tiny_04") | {"model": {"path": ".", "kv_heads": 1}}
    for name in ("problem.json", "problem.yaml"):
        (tmp_path / name).write_text(json.dumps(stated))
        model = read_problem(tmp_path / name).model
        assert (model.params, model.layers, model.ffn, model.q_heads, model.kv_heads) == (656, 2, 12, 4, 1)
    config.write_text(json.dumps(sizes))
    with pytest.raises(ConfigError, match=r"problem\.json: model\.path: .* config\.json has no num_attention_heads"):
        read_problem(tmp_path / "problem.json")
    # Over the wire nobody names this machine's folders.
    with pytest.raises(ConfigError, match=r"model\.path: unknown key"):
        parse_problem(json.dumps(stated), source="problem")
