"""One run of `penstock run` at a real size, and what it says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.children import child, environment, tail
from benchmarks.size.observer import PERIOD_S, Observer
from penstock.process.tasks import end
from services.trainer.reporting.metrics import JsonLines

RUN_ID = "size"
PROCESSES = 2
TIMEOUT_S = 900.0
_LOADING, _LOADED, _ENGINE = "trainer starting: loading", "trainer starting: opening", "generator-0 is up"
_NUM_PROMPTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Steps and samples."""

    steps: int = 3
    prompts_per_step: int = 2
    group_size: int = 4
    prompt_tokens: int = 32
    max_new_tokens: int = 32
    pack_tokens: int = 128
    kv_cache_gib: float = 0.5


def document(folder: Path, model: Path, size: Size) -> dict[str, Any]:
    """The configuration of the run, whose folder and rows are made as well."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"{number} + {number} = ", "answer": str(2 * number)} for number in range(_NUM_PROMPTS)]
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {
        "run": {
            "id": RUN_ID,
            "dir": str(folder),
            "num_steps": size.steps,
            "num_eval_prompts": 0,
            "checkpoint_every_steps": size.steps,
        },
        "model": {"path": str(model), "dtype": "bfloat16"},
        "data": {"train": str(data), "max_prompt_tokens": size.prompt_tokens},
        "sampling": {"max_new_tokens": size.max_new_tokens},
        "algorithm": {"group_size": size.group_size, "prompts_per_step": size.prompts_per_step, "max_staleness": 1},
        "trainer": {
            "device": "cpu",
            "processes": PROCESSES,
            "tokens_per_pack": size.pack_tokens,
            "gradient_checkpointing": False,
        },
        "generator": {
            "engine": "vllm",
            "kv_cache_gib": size.kv_cache_gib,
            "max_concurrent_samples": size.prompts_per_step * size.group_size,
            "max_context_tokens": size.prompt_tokens + size.max_new_tokens,
        },
        "reward": {"model": "benchmarks.size.reward:by_token_ids"},
        "log": {"format": "json"},
    }


async def observed_run(folder: Path, model: Path, size: Size) -> dict[str, Any]:
    """Run to the end.

    Raises:
        RuntimeError: The run failed, or took longer than TIMEOUT_S.
    """
    config, log = folder / "size.yaml", folder / "console.log"
    # JSON is YAML.
    config.write_text(json.dumps(document(folder, model, size)), encoding="utf-8")
    began_s = time.monotonic()
    command = (sys.executable, "-m", "console", "run", str(config))
    async with child(*command, log=log, env=environment(num_threads=1)) as process:
        observer = Observer(process.pid)
        watching = asyncio.create_task(observer.run())
        seen = asyncio.create_task(_first_seen(log))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await process.wait()
        except TimeoutError as error:
            raise RuntimeError(f"the run took longer than {TIMEOUT_S:g} s\n{tail(log)}") from error
        finally:
            await end(watching, seen)
    times_s = seen.result() if not seen.cancelled() else {}
    lines = JsonLines(folder / RUN_ID / "metrics.jsonl").read()
    if process.returncode or len(lines) < size.steps:
        raise RuntimeError(f"the run ended with status {process.returncode} after {len(lines)} steps\n{tail(log)}")
    # The first step waits for the engine, and has published nothing.
    lines = lines[1:]
    swaps = _swaps(folder / RUN_ID / "logs" / "generator-0.log")
    return {
        "wall_s": time.monotonic() - began_s,
        "load_s": times_s[_LOADED] - times_s[_LOADING],
        "engine_start_s": times_s[_ENGINE] - began_s,
        "step_s": statistics.median(line["time/step_s"] for line in lines),
        "train_s": statistics.median(line["time/train_s"] for line in lines),
        "publish_pause_share": statistics.median(line["publish/pause_share"] for line in lines),
        "offer_s": statistics.median(line["publish/offer_s"] for line in lines),
        "published_bytes": lines[-1]["publish/bytes"],
        # The first version is installed before anything is decoded.
        "swap_s": statistics.median(swaps[1:]),
        "swap_max_s": max(swaps[1:]),
        "peaks_mb": observer.peaks_mb,
        "own_mb": observer.own_mb,
        "link_bytes": observer.links,
    }


async def _first_seen(log: Path) -> dict[str, float]:
    """When the lines of a run's start appeared in its output, monotonic seconds."""
    found: dict[str, float] = {}
    while len(found) < 3:
        with contextlib.suppress(OSError):
            text = await asyncio.to_thread(log.read_text, encoding="utf-8", errors="replace")
            for line in (_LOADING, _LOADED, _ENGINE):
                if line in text:
                    found.setdefault(line, time.monotonic())
        await asyncio.sleep(PERIOD_S)
    return found


def _swaps(log: Path) -> list[float]:
    """How long each swap kept decoding still, seconds."""
    found = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and event.get("event") == "weights installed":
                found.append(float(event["pause_s"]))
    return found
