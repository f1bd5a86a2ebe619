"""The reward-model SDK: write a function, serve it, check it.

Example:
    from penstock.rewards import serve

    def my_reward(completion: str, answer: str) -> float:
        return float(completion.strip().endswith(answer))

    serve(my_reward, listen="127.0.0.1:7310")
"""

from penstock.rewards.function import FunctionReward, reward
from penstock.rewards.loading import RewardLoadError, load_reward
from penstock.rewards.model import BatchReward, ModelAwayError, RewardModel
from penstock.rewards.serving import serve, serve_async
from penstock.rewards.types import RewardItem, RewardResult, ScoreStatus, Turn, UnscorableError

__all__ = [
    "BatchReward",
    "FunctionReward",
    "ModelAwayError",
    "RewardItem",
    "RewardLoadError",
    "RewardModel",
    "RewardResult",
    "ScoreStatus",
    "Turn",
    "UnscorableError",
    "load_reward",
    "reward",
    "serve",
    "serve_async",
]
