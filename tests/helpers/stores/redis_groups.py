"""Redis Sentinel and Redis Cluster for tests: real ones, on free ports of loopback."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import redis

from tests.helpers.ports import free_port
from tests.helpers.stores.redis_server import RedisProcess, find_redis_server, launch, wait_until_answering

SERVICE = "penstock-test"
BUS_OFFSET = 10_000
"""A node of a Cluster also listens on its port plus this."""
NUM_SLOTS = 16_384
READY_TIMEOUT_S = 20.0
_SYNC_AT_ONCE = ("--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "0")


class SentinelGroup:
    """A master, its replicas and the Sentinels that watch them."""

    def __init__(self, folder: Path, *, num_replicas: int = 1, num_sentinels: int = 1) -> None:
        self._folder = folder
        self.servers = [RedisProcess(_made(folder / f"node-{index}")) for index in range(1 + num_replicas)]
        self._ports = [free_port() for _ in range(num_sentinels)]
        self._sentinels: list[subprocess.Popen[bytes]] = []

    @property
    def url(self) -> str:
        """For a broker."""
        hosts = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    def start(self) -> None:
        """Start all, and wait until the replicas are in step and the Sentinels know them and each other."""
        master, *replicas = self.servers
        master.settings = _SYNC_AT_ONCE
        master.start()
        for replica in replicas:
            replica.settings = _following(master)
            replica.start()
        _until(lambda: _info(master, "replication").get("connected_slaves") == len(replicas))
        for replica in replicas:
            _until(lambda replica=replica: _info(replica, "replication").get("master_link_status") == "up")
        for port in self._ports:
            self._sentinels.append(self._start_sentinel(port, master.port))
        for port in self._ports:
            _until(lambda port=port: self._knows_all(port))

    def stop(self) -> None:
        """Kill all."""
        for process in self._sentinels:
            process.send_signal(signal.SIGKILL)
            process.wait(timeout=10)
        self._sentinels.clear()
        for server in self.servers:
            server.kill()

    def master(self) -> RedisProcess:
        """The server that the Sentinels take for the master."""
        for port in self._ports:
            with suppress(redis.RedisError), closing(redis.Redis(port=port)) as sentinel:
                _, master_port = sentinel.sentinel_get_master_addr_by_name(SERVICE)
                return next(server for server in self.servers if server.port == master_port)
        raise AssertionError("no Sentinel knows a master")

    def restart_as_replica(self, server: RedisProcess) -> None:
        """Bring back one that was killed, to follow the present master."""
        server.settings = _following(self.master())
        server.start()

    def is_whole(self) -> bool:
        """Whether all other servers follow the master."""
        return bool(_info(self.master(), "replication").get("connected_slaves") == len(self.servers) - 1)

    def flush(self) -> None:
        """Empty it."""
        self.master().command("FLUSHALL")

    def _start_sentinel(self, port: int, master_port: int) -> subprocess.Popen[bytes]:
        quorum = len(self._ports) // 2 + 1
        folder = _made(self._folder / f"sentinel-{port}")
        config = folder / "sentinel.conf"
        config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} {quorum}\n"
            f"sentinel down-after-milliseconds {SERVICE} 500\n"
            f"sentinel failover-timeout {SERVICE} 3000\n"
            f"sentinel parallel-syncs {SERVICE} 2\n"
        )
        process = launch([find_redis_server(), str(config), "--sentinel"], folder / "sentinel.log")
        wait_until_answering(f"redis://127.0.0.1:{port}")
        return process

    def _knows_all(self, port: int) -> bool:
        with closing(redis.Redis(port=port)) as sentinel:
            state = sentinel.sentinel_master(SERVICE)
        is_known = state["num-slaves"] == len(self.servers) - 1
        return bool(is_known and state["num-other-sentinels"] == len(self._ports) - 1)


class ClusterGroup:
    """A Redis Cluster of masters that share the slots evenly."""

    def __init__(
        self, folder: Path, *, num_masters: int = 3, is_persistent: bool = False, node_timeout_ms: int = 2000
    ) -> None:
        self.nodes = [
            RedisProcess(_made(folder / f"node-{index}"), is_persistent=is_persistent, port=_free_pair())
            for index in range(num_masters)
        ]
        self._node_timeout_ms = node_timeout_ms

    @property
    def url(self) -> str:
        """For a broker."""
        return "redis+cluster://" + ",".join(node.address for node in self.nodes)

    def start(self) -> None:
        """Start the nodes, deal out the slots, introduce them, and wait until all agree."""
        for node in self.nodes:
            node.settings = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(self._node_timeout_ms))
            node.start()
        share = -(-NUM_SLOTS // len(self.nodes))
        for index, node in enumerate(self.nodes):
            slots = range(index * share, min(NUM_SLOTS, (index + 1) * share))
            node.command("CLUSTER", "ADDSLOTS", *slots)
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index:
                node.command("CLUSTER", "MEET", "127.0.0.1", self.nodes[0].port)
        for node in self.nodes:
            _until(lambda node=node: self._is_complete(node))

    def stop(self) -> None:
        """Kill all."""
        for node in self.nodes:
            node.kill()

    def flush(self) -> None:
        """Empty it."""
        for node in self.nodes:
            node.command("FLUSHALL")

    def owner(self, key: str) -> RedisProcess:
        """The node that a key was dealt to."""
        slot = self.nodes[0].command("CLUSTER", "KEYSLOT", key)
        return self.nodes[slot // -(-NUM_SLOTS // len(self.nodes))]

    def move(self, key: str, target: RedisProcess) -> None:
        """Move the slot of a key, with all that is in it, as an operator does while clients go on."""
        source, slot = self.owner(key), self.nodes[0].command("CLUSTER", "KEYSLOT", key)
        source_id, target_id = (_text(node.command("CLUSTER", "MYID")) for node in (source, target))
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
        while names := source.command("CLUSTER", "GETKEYSINSLOT", slot, 10):
            source.command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *names)
        for node in (target, source, *self.nodes):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def _is_complete(self, node: RedisProcess) -> bool:
        text = node.command("CLUSTER", "INFO")
        lines = dict(line.split(":", 1) for line in _text(text).split("\r\n") if ":" in line)
        return lines["cluster_state"] == "ok" and int(lines["cluster_known_nodes"]) == len(self.nodes)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\r\n".join(f"{key}:{item}" for key, item in value.items())
    return value.decode() if isinstance(value, bytes) else str(value)


def _following(master: RedisProcess) -> tuple[str, ...]:
    return (*_SYNC_AT_ONCE, "--replicaof", "127.0.0.1", str(master.port))


def _info(server: RedisProcess, section: str) -> dict[str, Any]:
    with closing(redis.Redis.from_url(server.url)) as client:
        found: dict[str, Any] = client.info(section)
    return found


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _free_pair() -> int:
    """A port with a free one BUS_OFFSET above."""
    while True:
        port = free_port()
        if port + BUS_OFFSET > 65_535:
            port -= 2 * BUS_OFFSET
        with suppress(OSError), closing(socket.socket()) as first, closing(socket.socket()) as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + BUS_OFFSET))
            return port


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the servers did not get ready"
        time.sleep(0.02)
