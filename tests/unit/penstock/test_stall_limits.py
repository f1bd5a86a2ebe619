"""Silence limits follow from the longest completion and the slowest generator, and say where they come from."""

from __future__ import annotations

from penstock.stall_limits import MOST_DERIVED_S, sample_speeds, silence_limit
from penstock.v1 import broker_pb2


def limit(max_tokens: int, speeds: dict[str, float], configured_s: float | None = None):  # type: ignore[no-untyped-def]
    return silence_limit(
        setting="trainer.max_silence_s",
        configured_s=configured_s,
        least_s=1800.0,
        max_tokens=max_tokens,
        speeds=speeds,
    )


def test_the_first_group_of_32k_tokens_at_20_tokens_a_second_is_waited_for() -> None:
    found = limit(32_768, {"gen-1": 25.0, "gen-2": 20.0})
    assert found.value_s == 4915 > 27 * 60
    assert str(found) == "4915 s (3 x 32768 tokens at 20 tokens/s of gen-2; trainer.max_silence_s sets another)"


def test_short_completions_leave_the_least_limit() -> None:
    found = limit(256, {"gen-1": 20.0})
    assert str(found) == (
        "1800 s (the least, more than 3 x 256 tokens at 20 tokens/s of gen-1; trainer.max_silence_s sets another)"
    )
    assert str(limit(32_768, {})) == (
        "1800 s (the least, as no generator was seen to decode; trainer.max_silence_s sets another)"
    )


def test_what_is_configured_holds() -> None:
    assert str(limit(32_768, {"gen-1": 20.0}, configured_s=7.5)) == "7.5 s (as trainer.max_silence_s says)"


def test_a_generator_that_hardly_moves_is_not_waited_for_for_ever() -> None:
    assert limit(1 << 20, {"gen-1": 1e-9}).value_s == MOST_DERIVED_S


def test_the_speed_of_a_sample_is_its_share_of_the_generators() -> None:
    views = [
        broker_pb2.GeneratorView(
            hello=broker_pb2.GeneratorHello(generator_id=name),
            beat=broker_pb2.GeneratorBeat(num_running=running),
            measured_tokens_per_second=rate,
        )
        for name, running, rate in (("busy", 64, 1280.0), ("idle", 0, 50.0), ("new", 3, 0.0))
    ]
    assert sample_speeds(views) == {"busy": 20.0, "idle": 50.0}
