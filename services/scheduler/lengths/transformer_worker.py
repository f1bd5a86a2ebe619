"""Runs the transformer that forecasts lengths in a child process: everything that needs torch.

    {"fit": {...}}                       fine-tunes, and leaves a Hugging Face folder with lengths.json in it
    {"folder": ..., "prompts": [...]}    scores prompts: {"logs": [...]}

One JSON request a line on stdin, one answer a line on stdout, {"error": ...} if it fails. It exits at the end of stdin,
when the parent died. A prompt is `{"text": ...}`, tokenized by the model's own
tokenizer, or `{"ids": [...]}`, taken as the model's own ids. A prompt that the model cannot read (ids beyond its
vocabulary, text without a tokenizer) is given the mean.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer

# Axes: B prompts, T padded tokens.
MAX_TOKENS = 512
MAX_BATCH_TOKENS, MAX_BATCH_PROMPTS = 4096, 16
LEARNING_RATE = 1e-4
HEAD_LEARNING_RATE = 1e-3
"""The head is new; the rest is pretrained."""
_FACTS = "lengths.json"
_NUM_LOADED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranker:
    """A model with the scaling of its output to log tokens."""

    model: Any
    tokenizer: Any
    mean: float
    deviation: float
    device: torch.device


def main() -> None:
    """Answer requests until stdin ends, even while one is worked on."""
    logging.disable(logging.CRITICAL)
    answers, sys.stdout = sys.stdout, sys.stderr
    if "OMP_NUM_THREADS" not in os.environ:
        # More threads than free cores wait for each other; set the number explicitly if cores are free.
        torch.set_num_threads(1)
    requests: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    loaded: OrderedDict[str, Ranker] = OrderedDict()
    while True:
        try:
            answer = _answer(json.loads(requests.get()), loaded)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _receive(requests: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(1)


def _answer(request: dict[str, Any], loaded: OrderedDict[str, Ranker]) -> dict[str, Any]:
    if "fit" in request:
        fit(**request["fit"])
        return {}
    folder = request["folder"]
    if folder not in loaded:
        facts = json.loads((Path(folder) / _FACTS).read_text(encoding="utf-8"))
        loaded[folder] = _load(folder, mean=facts["mean"], deviation=facts["deviation"])
    loaded.move_to_end(folder)
    while len(loaded) > _NUM_LOADED:
        loaded.popitem(last=False)
    return {"logs": score(loaded[folder], request["prompts"])}


def fit(
    *,
    model_path: str,
    output: str,
    prompts: list[dict[str, Any]],
    targets: list[float],
    weights: list[float],
    num_epochs: int,
) -> None:
    """Fine-tune to `targets`, log tokens, each weighted by its importance."""
    mean, deviation = _moments(targets)
    ranker = _load(model_path, mean=mean, deviation=deviation)
    ids = [_encode(ranker, prompt) for prompt in prompts]
    examples = [index for index, each in enumerate(ids) if each]
    head = list(ranker.model.score.parameters()) if hasattr(ranker.model, "score") else []
    rest = [each for each in ranker.model.parameters() if all(each is not mine for mine in head)]
    groups = [{"params": rest, "lr": LEARNING_RATE}, {"params": head, "lr": HEAD_LEARNING_RATE}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    rng = random.Random(0)
    batches = [batch for _ in range(num_epochs) for batch in _batches(ids, rng.sample(examples, len(examples)))]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / (len(batches) + 1))
    ranker.model.train()
    for batch in batches:
        wanted = torch.tensor([(targets[index] - mean) / deviation for index in batch], device=ranker.device)
        importance = torch.tensor([weights[index] for index in batch], device=ranker.device)
        errors = _outputs(ranker, [ids[index] for index in batch]) - wanted
        loss = (importance * errors**2).sum() / importance.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(ranker.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    _save(ranker, Path(output))


def score(ranker: Ranker, prompts: Sequence[dict[str, Any]]) -> list[float]:
    """Log tokens of each prompt."""
    ranker.model.eval()
    ids = [_encode(ranker, prompt) for prompt in prompts]
    logs = [ranker.mean] * len(prompts)
    for batch in _batches(ids, [index for index, each in enumerate(ids) if each]):
        with torch.inference_mode():
            outputs = _outputs(ranker, [ids[index] for index in batch]).tolist()
        for index, output in zip(batch, outputs, strict=True):
            logs[index] = ranker.mean + ranker.deviation * output
    return logs


def _moments(targets: Sequence[float]) -> tuple[float, float]:
    values = torch.tensor(targets, dtype=torch.float64)
    return float(values.mean()), max(1e-3, float(values.std()))


def _load(path: str, *, mean: float, deviation: float) -> Ranker:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1, local_files_only=True, trust_remote_code=False, dtype=torch.float32
    ).to(device)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError):
        tokenizer = None
    if model.config.pad_token_id is None:
        pad_id = getattr(tokenizer, "pad_token_id", None)
        model.config.pad_token_id = pad_id if pad_id is not None else model.config.eos_token_id or 0
    return Ranker(model=model, tokenizer=tokenizer, mean=mean, deviation=deviation, device=device)


def _encode(ranker: Ranker, prompt: dict[str, Any]) -> list[int]:
    """Token ids, the last MAX_TOKENS; empty if the model cannot read the prompt."""
    if "text" in prompt:
        ids = [] if ranker.tokenizer is None else ranker.tokenizer.encode(prompt["text"], add_special_tokens=False)
    else:
        ids = prompt["ids"]
    is_readable = all(0 <= each < ranker.model.config.vocab_size for each in ids)
    return list(ids[-MAX_TOKENS:]) if is_readable else []


def _batches(ids: Sequence[Sequence[int]], order: Sequence[int]) -> Iterator[list[int]]:
    """Indices in that order, in batches of at most MAX_BATCH_PROMPTS prompts and MAX_BATCH_TOKENS padded tokens."""
    batch: list[int] = []
    longest = 0
    for index in order:
        longest = max(longest, len(ids[index]))
        if batch and (len(batch) == MAX_BATCH_PROMPTS or (len(batch) + 1) * longest > MAX_BATCH_TOKENS):
            yield batch
            batch, longest = [], len(ids[index])
        batch.append(index)
    if batch:
        yield batch


def _outputs(ranker: Ranker, ids: Sequence[Sequence[int]]) -> torch.Tensor:
    """The head's output, float32[B]."""
    rows = [torch.tensor(each) for each in ids]
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=ranker.model.config.pad_token_id)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    output = ranker.model(input_ids=ids_BT.to(ranker.device), attention_mask=mask_BT.to(ranker.device))
    return output.logits[:, 0].float()


def _save(ranker: Ranker, folder: Path) -> None:
    """Write the file atomically."""
    temporary = folder.with_name(folder.name + ".tmp")
    ranker.model.save_pretrained(temporary)
    if ranker.tokenizer is not None:
        ranker.tokenizer.save_pretrained(temporary)
    facts = {"mean": ranker.mean, "deviation": ranker.deviation}
    (temporary / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
    os.rename(temporary, folder)


if __name__ == "__main__":
    main()
