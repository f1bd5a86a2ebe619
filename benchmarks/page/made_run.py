"""A made run folder of any size: metrics of 10,000 steps, a recording of long samples, traces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from console.config.run_folder import RunFolder
from console.recording.parts import part_path

NUM_STEPS = 10_000
SAMPLES_PER_STEP, GROUP_SIZE = 1024, 8
TOKENS = 2048
"""Of each recorded sample, some 34 kB a line."""
PART_BYTES = 256_000_000
TRACES_SHARE = 0.25
"""Bytes of traces to those of the recording."""
SPANS_PER_LINE = 100
METRICS = ("reward/mean", "reward/std", "loss/kl", "loss/clip_fraction", "policy/entropy", "step/response_length_mean")


def make_run(folder: RunFolder, recording_bytes: float) -> None:
    """Write it."""
    folder.create()
    folder.config.write_text(f"run: {{id: {folder.path.name}, num_steps: {NUM_STEPS}}}\n", encoding="utf-8")
    begin_s = time.time() - 10.0 * NUM_STEPS
    with folder.metrics.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(_metrics(version, begin_s)) + "\n" for version in range(1, NUM_STEPS + 1))
    _write_parts(folder.path / "trajectories.jsonl", recording_bytes, _samples())
    _write_parts(folder.path / "traces.jsonl", recording_bytes * TRACES_SHARE, _traces(begin_s))


def _write_parts(path: Path, num_bytes: float, lines: Iterator[bytes]) -> None:
    written, number = 0, 1
    while written < num_bytes:
        size = 0
        with part_path(path, number).open("wb") as file:
            while size < PART_BYTES and written + size < num_bytes:
                size += file.write(next(lines))
        written, number = written + size, number + 1


def _metrics(version: int, begin_s: float) -> Mapping[str, float]:
    numbers = {name: (version % 97) / 97 + index for index, name in enumerate(METRICS)}
    filler = {f"made/{index:02}": version / (index + 1) for index in range(36)}
    times = {"time/step_s": 10.0, "time/idle_s": 2.0, "time/train_s": 8.0, "wait/samples_s": 2.0}
    sizes = {"step/samples": float(SAMPLES_PER_STEP), "step/response_tokens": float(SAMPLES_PER_STEP * TOKENS)}
    return {"policy_version": version, "time": begin_s + 10.0 * version, **numbers, **times, **sizes, **filler}


def _samples() -> Iterator[bytes]:
    """Rows as `record: true` writes them, in its order of fields, endlessly."""
    rest = {
        "messages": [],
        "prompt_token_ids": list(range(16)),
        "completion": "a sum, step by step: " * 400,
        "token_ids": [1000 + index % 9000 for index in range(TOKENS)],
        "logprobs": [-0.12345 - index / 1000 for index in range(TOKENS)],
        "versions": [0],
        "version_lengths": [TOKENS],
        "loss_mask": [],
        "finish_reason": "stop",
        "min_policy_version": 0,
        "max_policy_version": 0,
        "generator_id": "generator-0",
    }
    middle = _compact(rest)[1:-1]
    for number in range(2**31):
        version, group, index = number // SAMPLES_PER_STEP + 1, number // GROUP_SIZE, number % GROUP_SIZE
        head = {
            "run_id": "made",
            "policy_version": version,
            "history": 0,
            "group_id": f"g{group}",
            "sample_index": index,
            "group_size": GROUP_SIZE,
            "prompt": f"What is {group % 1000} plus {version}?",
        }
        score = {"status": "ok", "value": index / GROUP_SIZE, "components": {"correct": index / GROUP_SIZE}}
        yield f'{_compact(head)[:-1]},{middle},"score":{_compact(score)}}}\n'.encode()


def _traces(begin_s: float) -> Iterator[bytes]:
    """Lines of spans of eight generators in turn: what they decode, and lives of samples."""
    for number in range(2**31):
        at_s, name = begin_s + 2.0 * number, f"generator-{number % 8}"
        spans = [
            _span("rl.generator.decode" if index % 4 else "rl.sample.generate", at_s + index / 50, f"g{number}/{index}")
            for index in range(SPANS_PER_LINE)
        ]
        resource = {"service.name": "generator", "service.instance.id": name, "rl.run.id": "made"}
        group = {"resource": {"attributes": _attributes(resource)}, "scopeSpans": [{"spans": spans}]}
        yield f"{_compact({'resourceSpans': [group]})}\n".encode()


def _span(name: str, start_s: float, key: str) -> dict[str, object]:
    return {
        "traceId": "0" * 32,
        "spanId": "1",
        "parentSpanId": "",
        "name": name,
        "startTimeUnixNano": str(round(start_s * 1e9)),
        "endTimeUnixNano": str(round((start_s + 1) * 1e9)),
        "attributes": _attributes({"rl.sample.key": key}),
        "events": [],
    }


def _attributes(values: Mapping[str, str]) -> list[dict[str, object]]:
    return [{"key": key, "value": {"stringValue": value}} for key, value in values.items()]


def _compact(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))
