"""Maps configuration names to algorithms, without importing torch."""

from __future__ import annotations

from services.trainer.algorithms.base import Algorithm
from services.trainer.algorithms.cispo import CISPO
from services.trainer.algorithms.dapo import DAPO
from services.trainer.algorithms.distill import DISTILL, DISTILL_WITH_REWARD
from services.trainer.algorithms.dr_grpo import DR_GRPO
from services.trainer.algorithms.grpo import GRPO
from services.trainer.algorithms.gspo import GSPO
from services.trainer.algorithms.ppo import PPO
from services.trainer.algorithms.reinforce_plus_plus import REINFORCE_PLUS_PLUS
from services.trainer.algorithms.rloo import RLOO
from services.trainer.algorithms.tba import TBA

ALGORITHMS: dict[str, Algorithm] = {
    each.name: each
    for each in (
        *(GRPO, DR_GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE_PLUS_PLUS, PPO, TBA),
        *(DISTILL, DISTILL_WITH_REWARD),
    )
}
