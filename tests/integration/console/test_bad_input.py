"""Bad input to the command: one clear line, exit status 2, nothing started, nothing lost.

Most of it goes through the command in this process; what the process adds (its exit status, and what libraries write
to stderr past Python) is tested once, on several mistakes.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from console.run import preflight
from tests.helpers.console import ROOT, document, penstock, penstock_in_process, write_document, write_rows


@pytest.fixture(scope="module", autouse=True)
def _each_reward_model_is_imported_once() -> Iterator[None]:
    """In a real process, which takes a second; nearly every case has the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_import_problems", functools.cache(preflight._import_problems))
        yield


def refused(folder: Path, value: dict[str, Any] | None, *overrides: str) -> str:
    """The one line that `penstock run` says about a configuration."""
    path = folder / "config.yaml"
    if value is not None:
        write_document(folder, value)
    result = penstock_in_process("run", str(path), *overrides, cwd=folder)
    assert result.exit_code == 2, result.output
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert not (folder / "runs").exists(), "something was started"
    return lines[0]


def test_broken_yaml_is_reported_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {path: m\ndata: [")
    line = refused(tmp_path, None)
    assert "not valid YAML" in line
    assert "line 2" in line


def test_an_unknown_key_is_reported_with_the_nearest_known_one(tmp_path: Path) -> None:
    value = document(tmp_path)
    value["algorithm"] = {"group_sise": 8}
    line = refused(tmp_path, value)
    assert "algorithm.group_sise: unknown key; did you mean 'group_size'?" in line


def test_a_missing_model_is_reported_with_its_path(tmp_path: Path) -> None:
    value = document(tmp_path)
    value["model"]["path"] = str(tmp_path / "nowhere")
    line = refused(tmp_path, value)
    assert "model.path" in line
    assert f"{tmp_path / 'nowhere'}: no such directory" in line


def test_a_model_without_the_file_by_which_text_is_decoded_is_reported(tmp_path: Path) -> None:
    value = document(tmp_path)
    tokenizer = Path(value["model"]["path"]) / "tokenizer.json"
    tokenizer.rename(tokenizer.with_name("vocab.json"))
    told = f"model.path: {tokenizer.parent}: no tokenizer.json, by which token ids become the text that is scored"
    assert told in refused(tmp_path, value)
    # The reward worker stands here, wherever the trainer is.
    elsewhere = penstock_in_process("run", "config.yaml", "endpoints.trainer=127.0.0.1:1", cwd=tmp_path)
    assert (elsewhere.exit_code, told in elsewhere.stderr) == (2, True)
    trusts = "reward.trusts_generator_text=true"
    trusted = penstock_in_process("run", "config.yaml", "--dry-run", trusts, cwd=tmp_path)
    assert trusted.exit_code == 0, trusted.output


def test_empty_data_is_reported(tmp_path: Path) -> None:
    value = document(tmp_path)
    Path(value["data"]["train"]).write_text("\n")
    assert "data.train" in (line := refused(tmp_path, value))
    assert "holds no rows" in line


def test_a_row_without_an_answer_is_reported_with_its_line(tmp_path: Path) -> None:
    value = document(tmp_path)
    write_rows(Path(value["data"]["train"]), {"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2="})
    line = refused(tmp_path, value)
    assert "train.jsonl, line 2: no answer, which the reward exact_match needs" in line
    for reward in ("code", "[{model: format}]"):
        scored = penstock_in_process("run", "config.yaml", "--dry-run", f"reward={reward}", cwd=tmp_path)
        assert scored.exit_code == 0, scored.output


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused(tmp_path, document(tmp_path), f"listen.broker=127.0.0.1:{port}")
    assert f"listen.broker: port {port} is in use" in line


def test_an_unreachable_redis_is_reported_without_its_password(tmp_path: Path) -> None:
    value = document(tmp_path)
    value["broker"] = {"redis_url": "redis://:secret@127.0.0.1:1/0"}
    line = refused(tmp_path, value)
    assert "broker.redis_url: Redis at redis://:***@127.0.0.1:1/0 cannot be reached" in line
    assert "secret" not in line


def test_a_reward_server_that_is_down_is_reported(tmp_path: Path) -> None:
    line = refused(tmp_path, document(tmp_path), "reward=grpc://127.0.0.1:1")
    assert "reward.model: reward server: nothing answers at 127.0.0.1:1" in line


def test_a_judge_that_is_down_is_reported(tmp_path: Path) -> None:
    reward = "{model: judge, judge: {url: 'http://127.0.0.1:1/v1', model: m}}"
    line = refused(tmp_path, document(tmp_path), f"reward={reward}")
    assert "reward.judge: judge http://127.0.0.1:1/v1: ConnectError" in line


def test_prompts_and_completions_longer_than_the_context_are_reported(tmp_path: Path) -> None:
    line = refused(tmp_path, document(tmp_path), "sampling.max_new_tokens=500")
    assert "64 + 500 = 564, longer than the model's context of 512 tokens" in line


def test_a_machine_that_is_not_the_problems_is_reported(tmp_path: Path) -> None:
    value = document(tmp_path)
    generator = {"run_id": "r1", "model_path": "m", "cache_dir": "c"}
    node = {"node_id": "l40s-1", "gpu": "L40S", "gpus": 4, "scheduler": "s:1", "dir": "d", "generator": generator}
    (tmp_path / "node.yaml").write_text(yaml.safe_dump(node))
    problem = ROOT / "examples" / "two_sites.yaml"
    value["scheduler"] = {"problem": str(problem), "nodes": [str(tmp_path / "node.yaml")]}
    line = refused(tmp_path, value)
    assert f"scheduler.nodes: {tmp_path / 'node.yaml'}: gpus: 4, and {problem} has 8 for l40s-1; set gpus" in line


def test_data_with_only_overlong_prompts_is_reported(tmp_path: Path) -> None:
    value = document(tmp_path)
    write_rows(Path(value["data"]["train"]), {"prompt": "1+" * 100 + "1=", "answer": "101"})
    line = refused(tmp_path, value)
    assert "data.train" in line
    assert "every prompt is longer than data.max_prompt_tokens = 64" in line


def test_a_wrong_type_is_reported_with_the_value(tmp_path: Path) -> None:
    line = refused(tmp_path, document(tmp_path), "run.num_steps=many")
    assert "run.num_steps" in line
    assert "got 'many'" in line


@pytest.mark.parametrize(
    ("reward", "words"),
    [("exact_macth", "did you mean 'exact_match'"), ("no_such_module:f", "no module 'no_such_module'")],
)
def test_a_reward_that_does_not_exist_is_reported(tmp_path: Path, reward: str, words: str) -> None:
    assert words in refused(tmp_path, document(tmp_path), f"reward={reward}")


@pytest.mark.parametrize("override", ["sampling.top_p=0.9", "sampling.top_k=50", "sampling.min_p=0.05"])
def test_sampling_from_another_distribution_than_the_trainers_is_reported(tmp_path: Path, override: str) -> None:
    name, value = override.removeprefix("sampling.").split("=")
    line = refused(tmp_path, document(tmp_path), override, "--dry-run")
    assert f"sampling: {name}: {value} would sample from another distribution" in line
    assert f"leave {name} out" in line


def test_an_endpoint_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    line = refused(tmp_path, document(tmp_path), "endpoints.broker=127.0.0.1:1")
    assert "endpoints.broker: nothing answers at 127.0.0.1:1" in line


def test_an_existing_run_folder_is_not_touched(tmp_path: Path) -> None:
    value = document(tmp_path)
    kept = tmp_path / "runs" / "r1" / "metrics.jsonl"
    kept.parent.mkdir(parents=True)
    kept.write_text("precious\n")
    result = penstock_in_process("run", str(write_document(tmp_path, value)), cwd=tmp_path)
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert kept.read_text() == "precious\n"


def test_every_problem_gets_its_own_line_from_the_process_and_nothing_else(tmp_path: Path) -> None:
    path = write_document(tmp_path, document(tmp_path))
    # gRPC is the library that writes past Python.
    arguments = ("run", str(path), "reward=grpc://127.0.0.1:1", "data.train=missing.jsonl")
    result = penstock(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert [line.split(": ")[2] for line in result.stderr.splitlines()] == ["data.train", "reward.model"]


def test_a_dry_run_prints_what_it_would_run_and_starts_nothing(tmp_path: Path) -> None:
    path = write_document(tmp_path, document(tmp_path))
    result = penstock_in_process("run", str(path), "run.num_steps=7", "--dry-run", cwd=tmp_path)
    assert result.exit_code == 0, result.output
    assert "num_steps: 7" in result.stdout
    assert not (tmp_path / "runs").exists()


def test_a_service_says_that_its_port_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = penstock("serve", "scheduler", "--listen", f"127.0.0.1:{port}", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"penstock: listen: cannot listen on 127.0.0.1:{port}")
