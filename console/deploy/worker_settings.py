"""Writes the configurations of reward workers and scorers, wherever a plan has them."""

from __future__ import annotations

from console.config.data_section import run_reward, source_rewards
from penstock.config import Document


def reward_settings(config: Document, *, broker: str, listen: str) -> Document:
    """Those of a reward worker of the run `config`."""
    return {
        "listen": listen,
        "run_id": config["run"]["id"],
        "broker": broker,
        "tokenizer_path": str(config["model"]["path"]),
        "reward": run_reward(config),
        **({"sources": own} if (own := source_rewards(config.get("data", {}))) else {}),
    }


def scorer_settings(config: Document, *, broker: str, listen: str) -> Document:
    """Those of a scorer of the run `config`."""
    trainer = config.get("trainer", {})
    stated = {key: trainer[key] for key in ("device", "tokens_per_pack", "num_threads") if key in trainer}
    return {
        "listen": listen,
        "run_id": config["run"]["id"],
        "broker": broker,
        "model_path": str(config["algorithm"].get("reference_path") or config["model"]["path"]),
        "dtype": config["model"].get("dtype", "auto"),
        **stated,
    }
