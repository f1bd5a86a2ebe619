"""Redis, Sentinels and a Cluster by mutual TLS and passwords, real ones behind a proxy that speaks TLS for them."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
import redis

from console.launch.probes import redis_problem
from penstock.config import ConfigError
from penstock.errors import ServiceUnavailableError
from penstock.security import NO_SECURITY, Security
from services.broker.storage.redis.authentication import NO_CREDENTIALS, RedisCredentials, protected_url
from services.broker.storage.redis.redis_store import RedisStore
from tests.helpers.certificates import issue, make_authority, make_security
from tests.helpers.proxies.tls_proxy import TLS_HANDSHAKE, recording, tls_in_front_of
from tests.helpers.stores.redis_groups import SERVICE, ClusterGroup, SentinelGroup
from tests.helpers.stores.redis_server import RedisProcess

PASSWORD, SENTINELS_PASSWORD = "open-the-data", "open-the-sentinels"
SECRETS = (PASSWORD.encode(), SENTINELS_PASSWORD.encode())


@pytest.fixture
def security(tmp_path, monkeypatch) -> Security:
    """Files by the environment."""
    made = issue(make_authority(tmp_path / "authority"), name="redis")
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
    monkeypatch.setenv("PENSTOCK_SENTINEL_PASSWORD", SENTINELS_PASSWORD)
    monkeypatch.setenv("PENSTOCK_REDIS_CA", str(made.ca_file))
    monkeypatch.setenv("PENSTOCK_REDIS_CERT", str(made.cert_file))
    monkeypatch.setenv("PENSTOCK_REDIS_KEY", str(made.key_file))
    return made


@pytest.fixture
def server(tmp_path):
    made = RedisProcess(tmp_path)
    made.start()
    made.command("CONFIG", "SET", "requirepass", PASSWORD)
    yield made
    made.kill()


async def problem_of(url: str, credentials: RedisCredentials) -> str:
    """Why a broker's store cannot be used by these; empty where it can."""
    stated = protected_url(url, credentials, setting="redis_url", security=NO_SECURITY)
    store = RedisStore.from_url(stated, credentials=credentials)
    try:
        await store.ping()
    except ServiceUnavailableError as error:
        return str(error)
    finally:
        await store.close()
    return ""


async def test_one_server_is_asked_by_mutual_tls(server, security, tmp_path):
    credentials = RedisCredentials.from_environment(NO_SECURITY)
    async with tls_in_front_of(server.port, security) as port:
        with recording({"redis": f"127.0.0.1:{port}"}, SECRETS) as at:
            recorder = at["redis"]
            assert await problem_of(f"rediss://{recorder.address}/0", credentials) == ""
            assert (set(recorder.first_bytes), recorder.seen) == ({TLS_HANDSHAKE}, set())
        (tmp_path / "other").mkdir()
        other = make_security(tmp_path / "other")
        url = f"rediss://127.0.0.1:{port}/0"
        for wrong in (NO_CREDENTIALS, RedisCredentials(ca_file=other.ca_file)):
            assert "certificate" in (await problem_of(url, wrong)).lower()
        assert await problem_of(url, RedisCredentials(ca_file=security.ca_file)) != ""


async def test_a_recorder_sees_the_password_of_a_plain_connection(server, security):
    with recording({"redis": server.address}, SECRETS) as at:
        assert await problem_of(f"redis://{at['redis'].address}/0", NO_CREDENTIALS) == ""
        assert at["redis"].seen == {PASSWORD.encode()}
        assert TLS_HANDSHAKE not in at["redis"].first_bytes


async def test_sentinels_and_the_master_they_name_are_asked_by_mutual_tls(security, tmp_path):
    group = SentinelGroup(tmp_path, num_replicas=0)
    group.start()
    try:
        master = group.servers[0]
        sentinel_port = int(group.url.split("/")[2].rpartition(":")[2])
        with closing(redis.Redis(port=sentinel_port)) as sentinel:
            sentinel.execute_command("SENTINEL", "SET", SERVICE, "auth-pass", PASSWORD)
            master.command("CONFIG", "SET", "requirepass", PASSWORD)
            sentinel.execute_command("ACL", "SETUSER", "default", "resetpass", f">{SENTINELS_PASSWORD}")
        credentials = RedisCredentials.from_environment(NO_SECURITY)
        async with (
            tls_in_front_of(master.port, security) as master_port,
            tls_in_front_of(sentinel_port, security, moved={master.port: master_port}) as port,
        ):
            url = f"rediss+sentinel://127.0.0.1:{port}/{SERVICE}"
            async with asyncio.timeout(20):
                # The Sentinel has to find its master again, by the password.
                while await problem_of(url, credentials) != "":  # noqa: ASYNC110 -- another process sets no event
                    await asyncio.sleep(0.1)
            without = RedisCredentials(
                ca_file=security.ca_file, cert_file=security.cert_file, key_file=security.key_file
            )
            assert await problem_of(url, without) != ""
    finally:
        group.stop()


async def test_a_cluster_is_asked_by_mutual_tls(security, tmp_path):
    group = ClusterGroup(tmp_path, num_masters=1)
    group.start()
    try:
        node = group.nodes[0]
        node.command("CONFIG", "SET", "requirepass", PASSWORD)
        credentials = RedisCredentials.from_environment(NO_SECURITY)
        moved: dict[int, int] = {}
        async with tls_in_front_of(node.port, security, moved=moved) as port:
            moved[node.port] = port
            assert await problem_of(f"rediss+cluster://127.0.0.1:{port}", credentials) == ""
    finally:
        group.stop()


async def test_before_a_run_its_redis_is_asked_by_mutual_tls(server, security):
    credentials = RedisCredentials.from_environment(NO_SECURITY)
    async with tls_in_front_of(server.port, security) as port:
        url = protected_url(f"rediss://127.0.0.1:{port}/0", credentials, setting="x", security=NO_SECURITY)
        assert await asyncio.to_thread(redis_problem, url, credentials=credentials) is None
        assert "certificate" in (await asyncio.to_thread(redis_problem, url) or "").lower()


@pytest.mark.parametrize("scheme", ["", "+sentinel", "+cluster"])
def test_no_password_leaves_the_machine_in_plain_text(monkeypatch, scheme):
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", PASSWORD)
    path = f"/{SERVICE}" if scheme == "+sentinel" else ""
    url = f"redis{scheme}://redis.example:6379{path}"
    with pytest.raises(ConfigError, match=r"^redis_url: a password would go to redis.example:6379.*rediss") as caught:
        protected_url(url, NO_CREDENTIALS, setting="redis_url", security=NO_SECURITY)
    assert PASSWORD not in str(caught.value)
    for allowed, security in ((url, Security(allows_plain=True)), (url.replace("redis", "rediss", 1), NO_SECURITY)):
        assert PASSWORD in protected_url(allowed, NO_CREDENTIALS, setting="redis_url", security=security)
    assert PASSWORD in protected_url("redis://127.0.0.1:1", NO_CREDENTIALS, setting="redis_url", security=NO_SECURITY)
    monkeypatch.setenv("PENSTOCK_REDIS_PASSWORD", "")
    assert protected_url(url, NO_CREDENTIALS, setting="redis_url", security=NO_SECURITY) == url


def test_the_sentinels_password_does_not_leave_the_machine_in_plain_text_either():
    credentials = RedisCredentials(sentinel_password=SENTINELS_PASSWORD)
    with pytest.raises(ConfigError, match=r"a password would go to s:26379"):
        protected_url("redis+sentinel://s:26379/main", credentials, setting="redis_url", security=NO_SECURITY)


def test_redis_is_known_by_its_own_files_or_by_those_of_everything(monkeypatch, tmp_path):
    everything = Security(ca_file=tmp_path / "ca", cert_file=tmp_path / "cert", key_file=tmp_path / "key")
    found = RedisCredentials.from_environment(everything)
    assert (found.ca_file, found.cert_file, found.key_file) == (
        everything.ca_file,
        everything.cert_file,
        everything.key_file,
    )
    monkeypatch.setenv("PENSTOCK_REDIS_CA", "/other")
    found = RedisCredentials.from_environment(everything)
    assert (str(found.ca_file), found.cert_file) == ("/other", None)
    monkeypatch.setenv("PENSTOCK_REDIS_CERT", "/cert")
    with pytest.raises(ConfigError, match=r"^PENSTOCK_REDIS_KEY: missing beside PENSTOCK_REDIS_CERT"):
        RedisCredentials.from_environment(everything)
