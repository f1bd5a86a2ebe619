"""A run of real processes with their metrics: broker, trainer of a tiny model, emulated generators, reward worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.network.rpc import open_channel
from penstock.v1 import trainer_pb2, trainer_pb2_grpc
from tests.helpers.models.tiny_model import make_tiny_model
from tests.helpers.observability import moody_reward
from tests.helpers.observability.served import Served
from tests.helpers.ports import free_port
from tests.helpers.trainers.training import run_document

RUN_ID = "r"


class TrainingSite:
    """The processes; the test starts them.

    Args:
        folder: For everything they write.
        weights_port: Where the trainer serves weights.
        weights_url: Where generators find those.
        variables: For the trainer's process.
        trainer: Further settings of it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        weights_port: int,
        weights_url: str,
        variables: Mapping[str, str],
        trainer: tuple[str, ...] = (),
    ) -> None:
        self.folder, self.model = folder, make_tiny_model(folder / "model")
        self.mood = folder / "mood"
        self.mood.write_text(moody_reward.FINE)
        self.broker = Served("broker", folder, "redis_url=memory://")
        self.trainer = Served(
            "trainer",
            folder,
            f"weights_listen=127.0.0.1:{weights_port}",
            f"weights_url={weights_url}",
            f"allowed_roots=[{folder}]",
            f"state_dir={folder / 'state'}",
            *trainer,
            variables=variables,
        )
        self.reward = Served(
            "reward",
            folder,
            f"run_id={RUN_ID}",
            f"broker={self.broker.address}",
            f"reward.model={moody_reward.__name__}:{moody_reward.score.__name__}",
            "reward.trusts_generator_text=true",
            variables={moody_reward.VARIABLE: str(self.mood)},
        )

    def generator(self, name: str, *, tokens_per_second: float) -> Served:
        """An emulated generator."""
        return Served(
            "generator",
            self.folder,
            f"run_id={RUN_ID}",
            f"generator_id={name}",
            f"broker={self.broker.address}",
            f"weights={self.trainer.address}",
            f"model_path={self.model}",
            f"cache_dir={self.folder / f'cache-{name}'}",
            f"relay_listen=127.0.0.1:{free_port()}",
            "engine.engine=emulated",
            "engine.emulated_mean_tokens=12",
            f"engine.emulated_tokens_per_second={tokens_per_second}",
            name=name,
        )

    async def start_run(self, **changes: Any) -> None:
        """Begin the run at the trainer; `section__key=value` changes its configuration."""
        document = run_document(self.folder, self.model, self.broker.address, num_steps=100_000, num_eval_prompts=0)
        for name, value in changes.items():
            section, _, key = name.partition("__")
            document.setdefault(section, {})[key] = value
        async with open_channel(self.trainer.address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)
            request = trainer_pb2.StartRunRequest(run_id=RUN_ID, config_json=json.dumps(document))
            await stub.StartRun(request, timeout=60)
