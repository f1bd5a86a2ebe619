"""Hosts as Linux has them: a network, a host name, a table of names and folders of their own, for real processes.

    site a: hosts -- bridge, gateway --(TUN) link (TUN)-- gateway, bridge -- hosts :site b

All hosts name each other in /etc/hosts. On each, FOLDERS are its own: the same paths with other contents, as on
machines without a shared disk. Root only; `find_obstacle` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.helpers.sites.link import Link, open_tun

_MTU = 1500
_WAIT = """
import socket, sys, time
for address in sys.argv[1:]:
    host, port = address.split(":")
    end_s = time.monotonic() + 120
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() > end_s:
                sys.exit(f"nothing listens at {address}: {error}")
            time.sleep(0.1)
"""


def find_obstacle() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"there is no command {missing[0]}"
    probe = f"penstock-probe-{os.getpid()}"
    try:
        os.close(open_tun(f"pp{os.getpid()}"))
        _ip("netns", "add", probe)
        _ip("netns", "delete", probe)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces or TUN devices here: {getattr(error, 'stderr', '') or error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine of a site."""

    name: str
    """As the others call it."""
    address: str
    """Its IPv4 address."""
    namespace: str
    """Its network namespace."""
    folder: Path
    """What it has under each of the sites' folders, by the folder's name."""
    folders: tuple[Path, ...]
    """Paths that it has for itself."""
    tables: Mapping[Path, Path]
    """What it has in place of files of /etc."""

    def own(self, path: Path) -> Path:
        """Where a file of this host is, seen from outside; raises ValueError if it is not below one of its folders."""
        for folder in self.folders:
            if path.is_relative_to(folder):
                return self.folder / folder.name / path.relative_to(folder)
        raise ValueError(f"{path} is below none of {', '.join(map(str, self.folders))}")

    def command(self, *command: str) -> list[str]:
        """A command as one that runs on this host, in the process that is started."""
        own = {**{self.folder / folder.name: folder for folder in self.folders}, **self.tables}
        binds = "".join(f"mount --bind '{source}' '{target}'; " for source, target in own.items())
        script = f'set -e; hostname {self.name}; {binds}exec "$@"'
        inside = ["unshare", "--uts", "--mount", "sh", "-c", script, "sh", *command]
        return ["ip", "netns", "exec", self.namespace, *inside]

    def start(self, *command: str, env: Mapping[str, str], cwd: Path, log: IO[Any] | int) -> subprocess.Popen[str]:
        """Start a command; its process id is that of the command itself."""
        changed = ("env", "-C", str(cwd), *command)
        return subprocess.Popen(
            self.command(*changed),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *command: str, env: Mapping[str, str], timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            self.command(*command), env=dict(env), capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def wait_for_listeners(self, *addresses: str, env: Mapping[str, str]) -> str:
        """Wait until something listens at each, seen from here; returns the problem, empty if all do within 120 s."""
        waited = self.run(sys.executable, "-c", _WAIT, *addresses, env=env, timeout_s=150)
        return waited.stderr if waited.returncode else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoSites:
    """The hosts by name, and the link between both sites."""

    hosts: Mapping[str, Host]
    link: Link
    gateways: tuple[str, str]
    """Namespaces of the near and the far site's gateway."""

    def link_bytes(self) -> tuple[int, int]:
        """What the kernel counted at the far end's device: bytes into the far site, and out of it."""
        counters = Path("/sys/class/net/wan/statistics")
        command = [
            "ip",
            "netns",
            "exec",
            self.gateways[1],
            "cat",
            str(counters / "rx_bytes"),
            str(counters / "tx_bytes"),
        ]
        inbound, outbound = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return int(inbound), int(outbound)


@contextmanager
def two_sites(
    near: Sequence[str],
    far: Sequence[str],
    *,
    folder: Path,
    folders: Sequence[Path],
    bits_per_second: float,
    delay_s: float,
) -> Iterator[TwoSites]:
    """Two running sites; everything is removed at the end.

    Args:
        near, far: Names of the hosts of each site. Into the far one nobody connects from outside.
        folder: Where the hosts' files are kept.
        folders: Paths, of different last names, that each host has for itself.
        bits_per_second: Rate of the link, each direction.
        delay_s: Of the link, one way.
    """
    tag = f"ps{os.getpid()}"
    gateways = (f"{tag}-a", f"{tag}-b")
    hosts: dict[str, Host] = {}
    # A name server that answers at once that it knows nothing: resolvers ask one for what no table has.
    tables = {folder / "hosts": Path("/etc/hosts"), folder / "resolv.conf": Path("/etc/resolv.conf")}
    for path in folders:
        path.mkdir(parents=True, exist_ok=True)
    for site, members in enumerate((near, far)):
        for index, name in enumerate(members):
            own = folder / name
            for path in folders:
                (own / path.name).mkdir(parents=True, exist_ok=True)
            address = f"10.{77 + site}.0.{10 + index}"
            namespace = f"{gateways[site]}{index}"
            hosts[name] = Host(
                name=name, address=address, namespace=namespace, folder=own, folders=tuple(folders), tables=tables
            )
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in hosts.values())]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    link: Link | None = None
    try:
        for site, gateway in enumerate(gateways):
            _make_gateway(gateway, address=f"10.{77 + site}.0.1")
        for name, host in hosts.items():
            _join(host, gateways[name in far])
        tuns = [open_tun(f"{tag}{end}") for end in "ab"]
        link = Link(*tuns, bits_per_second=bits_per_second, delay_s=delay_s)
        for site, (gateway, end) in enumerate(zip(gateways, "ab", strict=True)):
            _connect(gateway, f"{tag}{end}", to=f"10.{78 - site}.0.0/24")
        yield TwoSites(hosts=hosts, link=link, gateways=gateways)
    finally:
        if link is not None:
            link.close()
        for namespace in [*(host.namespace for host in hosts.values()), *gateways]:
            _end_processes(namespace)
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _end_processes(namespace: str) -> None:
    """kill -9 of all that run on a host, whoever started them."""
    found = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    for pid in map(int, found.stdout.split()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _make_gateway(namespace: str, *, address: str) -> None:
    _ip("netns", "add", namespace)
    _ip("link", "add", "lan", "type", "bridge", inside=namespace)
    _ip("address", "add", f"{address}/24", "dev", "lan", inside=namespace)
    _ip("link", "set", "lan", "up", inside=namespace)
    command = ["ip", "netns", "exec", namespace, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"]
    subprocess.run(command, check=True, capture_output=True)


def _join(host: Host, gateway: str) -> None:
    _ip("netns", "add", host.namespace)
    port = f"v{host.address.rpartition('.')[2]}"
    _ip("link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", gateway, inside=host.namespace)
    _ip("link", "set", port, "master", "lan", inside=gateway)
    _ip("link", "set", port, "up", inside=gateway)
    for device in ("lo", "eth0"):
        _ip("link", "set", device, "up", inside=host.namespace)
    _ip("address", "add", f"{host.address}/24", "dev", "eth0", inside=host.namespace)
    _ip("route", "add", "default", "via", f"{host.address.rpartition('.')[0]}.1", inside=host.namespace)


def _connect(gateway: str, device: str, *, to: str) -> None:
    """Move one end of the link to its gateway, and send there what is for the other site."""
    _ip("link", "set", device, "netns", gateway)
    _ip("link", "set", device, "name", "wan", "mtu", str(_MTU), inside=gateway)
    _ip("link", "set", "wan", "up", inside=gateway)
    _ip("route", "add", to, "dev", "wan", inside=gateway)


def _ip(*arguments: str, inside: str | None = None) -> None:
    where = [] if inside is None else ["-n", inside]
    subprocess.run(["ip", *where, *arguments], check=True, capture_output=True, text=True)
