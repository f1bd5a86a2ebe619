"""Settings of a scorer process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from penstock.config import MeasuredConfig, RunId, Targets
from penstock.storage.addresses import StoredPath


class ScorerConfig(MeasuredConfig):
    """A scorer: leases finished samples of one run, computes their log-probs under a frozen model."""

    listen: str = "127.0.0.1:7308"
    """Address of its health service, host:port."""
    run_id: RunId
    """The run whose samples it scores."""
    broker: Targets = "127.0.0.1:7301"
    """The broker, host:port; of a list of brokers on one Redis the first that works is used."""
    worker_id: str = "scorer-0"
    """Its name in status and logs, by default that of a certificate of roles."""
    model_path: StoredPath
    """Hugging Face directory of the reference or teacher, with the vocabulary of the run's model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Element type of its matrix products; auto is bfloat16 on GPUs for a model of 16 bits, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it computes; auto takes CUDA if available. The whole model is on this one device."""
    num_threads: int = Field(default=1, ge=1, le=1024)
    """CPU threads of PyTorch."""
    tokens_per_pack: int = Field(default=4096, ge=16)
    """Token budget of one packed forward pass; a longer sample gets a pack of its own."""
    max_leases: int = Field(default=64, ge=2, le=2048)
    """Most samples held at once: half of them are computed while the others wait."""
    max_pass_s: float = Field(default=600.0, gt=0, le=3600)
    """A forward pass that takes longer counts as hung: the process ends, and its leases go to another scorer."""
