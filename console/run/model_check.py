"""Checks a model's directory before anything is started, as plain files, without torch or transformers."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

from console.config.config import RunConfig
from console.config.run_folder import is_there
from penstock.config import ConfigError
from penstock.model.model_folder import TOKENIZER_FILE
from penstock.model.routers import NoRoutersError, read_routers
from penstock.reasoning_gym.rows import RowDrawer
from penstock.reasoning_gym.source import ReasoningGymSource
from penstock.storage.addresses import Address
from penstock.storage.fetched import fetched
from penstock.storage.storage import StorageError
from services.trainer.data.prompt_rows import DataError, Row, read_rows

_TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
# Older model families name their longest context differently.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_MAX_CONFIG_BYTES = 16 * 1024 * 1024


def model_problems(source: Path | Address, *, setting: str = "model.path") -> list[str]:
    """Problems of a model directory, or of what lies at an address, one line each; empty if it can be loaded."""
    try:
        path = fetched(setting, source, "model")
    except (ConfigError, StorageError) as error:
        return [str(error)]
    if not is_there(path):
        return [f"{setting}: {path}: no such directory"]
    if not path.is_dir():
        return [f"{setting}: {path}: not a directory; give the Hugging Face directory that holds config.json"]
    if _model_config(path) is None:
        return [f"{setting}: {path}: no readable config.json; give a Hugging Face directory of a causal language model"]
    problems = []
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        problems.append(f"{setting}: {path}: no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    if not any(next(path.glob(pattern), None) for pattern in _WEIGHT_PATTERNS):
        problems.append(f"{setting}: {path}: no weights (none of {', '.join(_WEIGHT_PATTERNS)})")
    return problems


def reference_problems(config: RunConfig) -> list[str]:
    """Problems of the model of scorers started here: another vocabulary would make its log-probs meaningless."""
    path = config.algorithm.reference_path
    if not config.num_scorers:
        return []
    if path is None:
        return model_problems(config.model.path) if config.endpoints.trainer is not None else []
    setting = "algorithm.reference_path"
    if problems := model_problems(path, setting=setting):
        return problems
    own, others = _vocabulary(config.model.folder), _vocabulary(fetched(setting, path, "model"))
    if own is not None and others is not None and own != others:
        problems.append(f"{setting}: {path}: its {TOKENIZER_FILE} has another vocabulary than that of model.path")
    return problems


def _vocabulary(path: Path) -> Any:
    """Token ids by token, of a tokenizer.json; None without."""
    try:
        return json.loads((path / TOKENIZER_FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def context_problem(config: RunConfig) -> str | None:
    """Why prompts and completions exceed the model's context; None if they fit, or if it states no limit."""
    most = _max_context_tokens(config.model.folder)
    needed = config.data.max_prompt_tokens + config.sampling.max_new_tokens
    if most is None or needed <= most:
        return None
    return (
        f"data.max_prompt_tokens + sampling.max_new_tokens is {config.data.max_prompt_tokens} + "
        f"{config.sampling.max_new_tokens} = {needed}, longer than the model's context of {most} tokens; lower one"
    )


def text_problem(config: RunConfig) -> str | None:
    """Why a reward worker started here could not decode completions; None if it can, or need not."""
    if not config.starts_reward or config.reward.trusts_generator_text:
        return None
    path = config.model.path
    try:
        if (fetched("model.path", path, "tokenizer") / TOKENIZER_FILE).is_file():
            return None
    except (ConfigError, StorageError) as error:
        return str(error)
    return (
        f"model.path: {path}: no {TOKENIZER_FILE}, by which token ids become the text that is scored; write one with "
        "transformers (AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)), or score what generators send, "
        "unchecked, with reward.trusts_generator_text=true"
    )


def routing_problem(config: RunConfig) -> str | None:
    """Why the model's experts cannot be recorded and replayed; None if they can, or need not."""
    if not config.algorithm.routing_replay:
        return None
    try:
        shape = read_routers(config.model.folder, field="algorithm.routing_replay").shape
    except NoRoutersError as error:
        return str(error)
    num_tokens = config.data.max_prompt_tokens
    most = shape.max_group_tokens // config.algorithm.group_size - config.sampling.max_new_tokens
    most = min(most, shape.max_prompt_tokens)
    if num_tokens <= most:
        return None
    return (
        f"data.max_prompt_tokens: {num_tokens}; at most {most} with algorithm.routing_replay, whose routes take "
        f"{shape.row_bytes} bytes a token: lower it, algorithm.group_size or sampling.max_new_tokens"
    )


def data_problems(config: RunConfig) -> tuple[list[str], list[str]]:
    """Problems of the data, and notes on it for the user."""
    problems = [problem for key, task in config.data.tasks.items() for problem in _task_problems(key, task)]
    warnings: list[str] = []
    sources, rewards = config.data.sources_of_rows, config.source_rewards
    for key, source in config.data.files.items():
        reward = rewards.get(sources[key], config.reward)
        # An environment may give the rewards, and know the answers.
        is_asked = config.endpoints.reward is None and config.environment is None
        needs_answer = reward.needs_answer if is_asked else ""
        try:
            path = fetched(key, source)
            rows = read_rows(path, needs_answer=needs_answer)
        except DataError as error:
            problems.append(f"{key}: {error}")
            continue
        except (ConfigError, StorageError) as error:
            problems.append(str(error))
            continue
        long_rows = _num_long_prompts(rows, config)
        if long_rows == len(rows):
            problems.append(
                f"{key}: {path}: every prompt is longer than data.max_prompt_tokens = {config.data.max_prompt_tokens}; "
                "raise it, or shorten the prompts"
            )
        elif long_rows:
            warnings.append(
                f"{key}: {long_rows} of {len(rows)} prompts are longer than data.max_prompt_tokens = "
                f"{config.data.max_prompt_tokens} and are skipped"
            )
    return problems, warnings


def _task_problems(field: str, task: ReasoningGymSource) -> list[str]:
    """Whether the task can be drawn from, by its first row."""
    try:
        with closing(RowDrawer(field, task)) as drawer:
            drawer.draw([0])
    except ConfigError as error:
        return [str(error)]
    return []


def _num_long_prompts(rows: list[Row], config: RunConfig) -> int:
    # A token encodes at least one byte, so only prompts with more bytes than the token limit need the tokenizer.
    texts = [_prompt_text(row) for row in rows]
    long_texts = [text for text in texts if len(text.encode()) > config.data.max_prompt_tokens]
    file = config.model.folder / TOKENIZER_FILE
    if not long_texts or not file.is_file():
        return 0
    try:
        from tokenizers import Tokenizer
    except ImportError:
        # Without a tokenizer here, the trainer, which has one, counts the tokens.
        return 0
    encodings = Tokenizer.from_file(str(file)).encode_batch(long_texts)
    return sum(len(encoding.ids) > config.data.max_prompt_tokens for encoding in encodings)


def _prompt_text(row: Row) -> str:
    return row.prompt if isinstance(row.prompt, str) else "".join(message.content for message in row.prompt)


def _max_context_tokens(path: Path) -> int | None:
    document = _model_config(path) or {}
    # Multimodal models keep the language model's settings in a separate section.
    inner = document.get("text_config")
    for part in (document, inner if isinstance(inner, dict) else {}):
        found = next((part[key] for key in _CONTEXT_KEYS if isinstance(part.get(key), int)), None)
        if found is not None:
            return int(found)
    return None


def _model_config(path: Path) -> dict[str, Any] | None:
    file = path / "config.json"
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            return None
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None
