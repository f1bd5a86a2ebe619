"""Checks a machine of a deployment before anything starts on it: `penstock doctor machine-NAME.yaml`.

Certificates of this run and this machine, the files that its services read, folders that they can write to, and the
GPUs of the inventory. Starts nothing, and asks no other machine but the object storage that the run names, and the
collector of its traces.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from console.devices.device_names import VARIABLE, given_devices
from console.devices.nvidia_smi import NvidiaSmiError, read_devices
from penstock.config import ConfigError, StrictModel, read_document, validate
from penstock.errors import BadTokenError
from penstock.security import Security
from penstock.security.checks.inspection import LOOPBACK, inspect
from penstock.security.credentials import JUDGES
from penstock.security.roles import ANY, Caller, caller_of_pem, role_name
from penstock.storage.addresses import Address, StoredPath
from penstock.storage.storage import Storage
from penstock.tracing.settings import collector_problem, endpoint_of

_LEAST_MEMORY_SHARE = 0.9
"""Drivers report somewhat less memory than the type's name promises."""


class MachineConfig(StrictModel):
    """What a machine needs; `penstock plan --deploy` writes it."""

    name: str
    """The machine's name in the plan, and in its certificate."""
    run_id: str
    site: str
    role: str
    """The role that its certificate must have."""
    more_roles: tuple[str, ...] = ()
    """Others that it must have, for what its plan may start there beside generators."""
    host: str
    """Name or address under which the other machines reach it."""
    has_certificates: bool = True
    """Whether services here speak TLS."""
    readable: dict[str, StoredPath] = Field(default_factory=dict)
    """Files and folders to read, by the setting that names each."""
    writable: dict[str, StoredPath] = Field(default_factory=dict)
    """Folders to write to; they are made when missing."""
    gpu: str = ""
    """Its GPU type in the problem; empty if no service computes on GPUs."""
    gpus: int = Field(default=0, ge=0)
    """Number of GPUs that its services need."""
    gpu_memory_gb: float = Field(default=0.0, ge=0)
    """Memory of each by the problem, 10^9 bytes."""


def machine_command(path: Path) -> int:
    """Print what this machine lacks; returns 1 if something is missing. Raises ConfigError."""
    problems = check_machine(path)
    for problem in problems:
        print(f"penstock: {problem}", file=sys.stderr)
    if (endpoint := endpoint_of()) and (problem := collector_problem()):
        # A run goes on without it, so it may start without it.
        print(f"penstock: warning: collector of traces {endpoint}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def check_machine(path: Path) -> list[str]:
    """The problems of this machine, a line each with its fix; `path` is its description. Raises ConfigError."""
    config = validate(MachineConfig, read_document(path), source=str(path))
    found = (*_certificate_problems(config), *_file_problems(config), *_gpu_problems(config))
    return [f"{config.name}: {problem}" for problem in found]


def _certificate_problems(config: MachineConfig) -> Iterator[str]:
    if not config.has_certificates:
        return
    try:
        security = Security.from_environment()
        Security.from_environment(JUDGES)
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    if security.cert_file is None:
        yield "PENSTOCK_TLS_CERT: not set; issue a certificate for this machine (README.md) and name its files"
        return
    for finding in inspect(security.tls_files, hosts=(LOOPBACK, config.host)):
        if finding.is_error or finding.what == f"name {LOOPBACK}":
            yield finding.text
    try:
        security.revocations.check_pem(security.cert_file.read_bytes())
    except BadTokenError as error:
        yield f"PENSTOCK_TLS_CERT: {security.cert_file}: {error}"
    caller = caller_of_pem(security.cert_file.read_bytes())
    # A certificate without roles opens everything: a team's own authority.
    if caller is not None:
        yield from _role_problems(config, caller, security.cert_file)


def _role_problems(config: MachineConfig, caller: Caller, path: Path) -> Iterator[str]:
    fix = f"issue the one for {config.name} of run {config.run_id} (README.md)"
    if caller.name not in ("", config.name) and not caller.is_operator:
        yield f"PENSTOCK_TLS_CERT: {path} is the certificate of {caller.name!r}; {fix}"
    grants = [each for each in caller.grants if role_name(each.role) in (config.role, "operator")]
    if not grants:
        yield f"PENSTOCK_TLS_CERT: {path} is of {caller}, not of the role {config.role}; {fix}"
    elif lacking := [role for role in config.more_roles if not _has(caller, role)]:
        yield f"PENSTOCK_TLS_CERT: {path} is of {caller}, not of the role {' and '.join(lacking)} as well; {fix}"
    elif not any(each.run_id in (ANY, config.run_id) for each in grants):
        yield f"PENSTOCK_TLS_CERT: {path} is of {caller}, not of run {config.run_id}; {fix}"
    elif not any(each.site in (ANY, config.site) for each in grants):
        yield f"PENSTOCK_TLS_CERT: {path} is of {caller}, not of site {config.site}; {fix}"


def _has(caller: Caller, role: str) -> bool:
    return any(role_name(each.role) in (role, "operator") for each in caller.grants)


def _file_problems(config: MachineConfig) -> Iterator[str]:
    for key, path in config.readable.items():
        if not isinstance(path, Path):
            yield from _storage_problems(key, path, is_written=False)
        elif not path.exists():
            yield f"{key}: {path} is not there; put it there, or name another one in RUN.yaml and deploy again"
        elif not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            yield f"{key}: {path} cannot be read by user {os.geteuid()}; change its owner or mode"
    for key, path in config.writable.items():
        if not isinstance(path, Path):
            yield from _storage_problems(key, path, is_written=True)
            continue
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            yield f"{key}: {path} cannot be made: {error.strerror}; make it, for user {os.geteuid()}"
            continue
        if not os.access(path, os.W_OK | os.X_OK):
            yield f"{key}: {path} cannot be written to by user {os.geteuid()}; change its owner: chown {os.geteuid()}"


def _storage_problems(key: str, address: Address, *, is_written: bool) -> Iterator[str]:
    """Why this machine cannot read what lies there, or write below it."""
    probe = f".penstock-doctor-{secrets.token_hex(8)}"
    try:
        storage = Storage(address)
        if is_written:
            storage.write(probe, b"")
            storage.delete(probe)
        else:
            storage.list()
    except (ConfigError, OSError) as error:
        yield f"{key}: {error}"


def _gpu_problems(config: MachineConfig) -> Iterator[str]:
    if not config.gpus:
        return
    fix = "correct `nodes` in the problem and plan again"
    try:
        devices = read_devices()
        given = given_devices(devices or (), os.environ.get(VARIABLE) if devices else None)
    except (NvidiaSmiError, ValueError) as error:
        yield f"gpus: {error}"
        return
    if len(given) < config.gpus:
        why = "there is no nvidia-smi" if devices is None else f"nvidia-smi shows {len(given)}"
        yield f"gpus: the plan uses {config.gpus} {config.gpu}, and {why}; {fix}"
        return
    for device in given[: config.gpus]:
        memory_gb = None if device.memory_mib is None else device.memory_mib * 2**20 / 1e9
        if memory_gb is not None and memory_gb < _LEAST_MEMORY_SHARE * config.gpu_memory_gb:
            yield (
                f"gpus: the plan counts on {config.gpu} of {config.gpu_memory_gb:g} GB, and GPU {device.index} is a "
                f"{device.name} of {memory_gb:.0f} GB; {fix}"
            )
