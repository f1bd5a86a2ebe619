"""GeneratorService: decode, ask the generator, encode."""

from __future__ import annotations

from penstock.errors import InvalidFieldError, require
from penstock.v1 import generator_pb2, generator_pb2_grpc
from services.generator.config import MAX_RELAY_PATIENCE_S
from services.generator.generator import MODE_MESSAGES, Generator

MAX_GRACE_S = 24 * 3600.0
_MODES = {message: mode for mode, message in MODE_MESSAGES.items()}


class GeneratorServicer(generator_pb2_grpc.GeneratorServiceServicer):
    """Control of one generator process."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def GetGenerator(
        self, _request: generator_pb2.GetGeneratorRequest, _context: object
    ) -> generator_pb2.GetGeneratorResponse:
        """State, speed and version."""
        return self._generator.view()

    async def DrainGenerator(
        self, request: generator_pb2.DrainGeneratorRequest, _context: object
    ) -> generator_pb2.DrainGeneratorResponse:
        """Drain; answers at once whether nothing is held any more."""
        grace_s = request.grace.ToNanoseconds() / 1e9 if request.HasField("grace") else None
        if grace_s is not None and not 0 <= grace_s <= MAX_GRACE_S:
            raise InvalidFieldError(f"grace of {grace_s} s is not in [0, {MAX_GRACE_S:.0f}]", field="grace")
        return generator_pb2.DrainGeneratorResponse(is_drained=self._generator.drain(grace_s))

    async def PauseGenerator(
        self, request: generator_pb2.PauseGeneratorRequest, _context: object
    ) -> generator_pb2.PauseGeneratorResponse:
        """Pause, or resume."""
        await self._generator.pause(request.is_paused)
        return generator_pb2.PauseGeneratorResponse()

    async def SetRelayPatience(
        self, request: generator_pb2.SetRelayPatienceRequest, _context: object
    ) -> generator_pb2.SetRelayPatienceResponse:
        """Another machine of its site, or this one, brings new versions."""
        run_id = self._generator.run_id
        require(request.run_id == run_id, "run_id", request.run_id, f"{run_id!r}, the run of this generator")
        patience_s = request.patience.ToNanoseconds() / 1e9
        require(0 <= patience_s <= MAX_RELAY_PATIENCE_S, "patience", patience_s, f"in [0, {MAX_RELAY_PATIENCE_S:g}] s")
        self._generator.set_relay_patience(patience_s)
        return generator_pb2.SetRelayPatienceResponse()

    async def PullWeights(
        self, request: generator_pb2.PullWeightsRequest, _context: object
    ) -> generator_pb2.PullWeightsResponse:
        """Fetch and install a version now."""
        mode = _MODES.get(request.mode)
        if request.mode == generator_pb2.UPDATE_MODE_UNSPECIFIED:
            mode = self._generator.update_mode
        if mode is None:
            raise InvalidFieldError(f"unknown update mode {request.mode}", field="mode")
        policy_version = request.policy_version if request.HasField("policy_version") else None
        if policy_version is not None and policy_version < 0:
            raise InvalidFieldError(f"policy version {policy_version} is negative", field="policy_version")
        report = await self._generator.pull(policy_version, mode)
        return generator_pb2.PullWeightsResponse(
            policy_version=report.policy_version,
            digest=report.digest,
            swap_pause_s=report.pause_s,
            mode=MODE_MESSAGES[mode],
            num_recomputed_tokens=report.num_recomputed_tokens,
        )
