"""Implements `penstock probe`: measures this machine into a small file, or answers others that measure the network."""

from __future__ import annotations

import asyncio
import platform
import tempfile

from console.config.reward_settings import read_reward_settings
from console.probe.link_server import Peer, serving_transfers
from console.probe.machine import measured_alone, this_machine
from console.probe.measurements import SKIPPABLE, Measurements, ProbeOptions, say
from console.probe.probe_file import check_folder, probe_json, write_probe
from console.probe.probe_text import summary
from penstock.config import ConfigError, validate
from penstock.network.rpc import PortUnavailableError
from penstock.process.signals import StopSignals
from penstock.security import Security
from penstock.targets import checked_address

EXIT_INCOMPLETE = 1


def probe_command(options: ProbeOptions, *, is_json: bool) -> int:
    """Measure and write the file; 1 if something that was asked for could not be measured. Raises ConfigError."""
    if unknown := [name for name in options.skip if name not in SKIPPABLE]:
        raise ConfigError(f"--skip: {unknown[0]!r} is none of {', '.join(SKIPPABLE)}")
    if options.model is not None and not (options.model / "config.json").is_file():
        raise ConfigError(f"--model: {options.model} holds no config.json; give a Hugging Face folder")
    if options.data is not None and options.reward is None:
        raise ConfigError("--data: has no effect without --reward RUN.yaml; name the run whose reward scores it")
    if options.reward is not None:
        read_reward_settings(options.reward)
    for target in options.peers:
        _checked(target, setting="--with")
    peer = _peer(options)
    measurements = Measurements(options, this_machine(options.cpu_devices), Security.from_environment())
    check_folder(options.out)
    try:
        with measured_alone():
            found = measurements.run(peer)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or tempfile.gettempdir()}: {error.strerror}; free some space, or name another folder for "
            "temporary files with TMPDIR"
        ) from error
    path = write_probe(options.out, found)
    if is_json:
        print(probe_json(found))
    else:
        print("\n".join(summary(found)))
        print(f"\nwritten to {path}")
    for reason in found.busy_because:
        say(f"this machine is busy: {reason}; probe it again when it is not, its rates are too low now")
    return EXIT_INCOMPLETE if measurements.has_failed else 0


def listen_command(listen: str, options: ProbeOptions) -> int:
    """Answer `--with` of other machines until Ctrl-C or SIGTERM. Raises ConfigError."""
    try:
        asyncio.run(_listen(_checked(listen, setting="--listen"), _peer(options), Security.from_environment()))
    except PortUnavailableError as error:
        raise ConfigError(str(error)) from error
    return 0


async def _listen(listen: str, peer: Peer, security: Security) -> None:
    with StopSignals() as signals:
        async with serving_transfers(listen, peer, security=security) as url:
            address = url.rpartition("//")[2]
            say(f"{peer.name} of site {peer.site} answers at {address}, until Ctrl-C")
            say(f"on another machine: penstock probe --with {peer.name}:{address.rpartition(':')[2]}")
            await signals.requested.wait()


def _peer(options: ProbeOptions) -> Peer:
    name = options.name if options.name is not None else platform.node()
    return validate(Peer, {"name": name, "site": options.site}, source="--name and --site")


def _checked(target: str, *, setting: str) -> str:
    try:
        return checked_address(target)
    except ValueError as error:
        raise ConfigError(f"{setting}: {target!r:.100}: {error}") from error
