"""The page's server: who may read it, what it refuses, and that nothing which a completion says becomes part of it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from console.page import answers, page_files, server
from console.page.run_data import RunData
from console.page.server import POLICY, serving_page
from console.page.view_command import view_command
from console.recording.recorded_sample import Recorded
from penstock.config import ConfigError
from penstock.security import NO_SECURITY, Security
from penstock.security.roles import Role, role_name
from tests.helpers.brokers.recordings import recorded
from tests.helpers.certificates import issue, make_authority
from tests.helpers.console import COMMAND
from tests.helpers.page.run_folders import page_folder, write_recording

HOSTILE = "</script><script>alert(1)</script>\x00\x1b[31m\u2028"
SECRET = "0123456789abcdef"


@pytest.fixture(autouse=True)
def page_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("<!doctype html><title>page</title>")
    (static / "main.js").write_text("export const a = 1;")
    (tmp_path / "secret.js").write_text("secret\n")
    monkeypatch.setattr(page_files, "STATIC", static)


def hostile_sample() -> Recorded:
    sample = recorded()
    sample.trajectory.text = HOSTILE
    return sample


@asynccontextmanager
async def page(
    tmp_path: Path, security: Security = NO_SECURITY
) -> AsyncIterator[tuple[aiohttp.ClientSession, str, str]]:
    """A session without cookies, the page's address, and its token."""
    folders = [page_folder(tmp_path / name) for name in ("a", "b")]
    write_recording(folders[0].path / "trajectories.jsonl", [hostile_sample()])
    async with (
        serving_page(list(map(RunData, folders)), "127.0.0.1:0", security=security, setting="--listen") as link,
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
    ):
        address, _, token = link.partition("/?token=")
        yield session, address, token


async def test_the_link_opens_it_and_nothing_else_does(tmp_path: Path) -> None:
    async with page(tmp_path) as (session, address, token):
        for path in ("/", "/static/main.js", "/api/runs", "/api/nothing", "/?token=wrong", "/?token="):
            async with session.get(address + path) as refused:
                assert refused.status == 401
                assert refused.headers["Content-Security-Policy"] == POLICY
                assert token not in await refused.text()
        async with session.get(f"{address}/?token={token}", allow_redirects=False) as redeemed:
            assert (redeemed.status, redeemed.headers["Location"]) == (303, "/")
            (cookie,) = redeemed.headers.getall("Set-Cookie")
            assert "HttpOnly" in cookie
            assert "SameSite=Strict" in cookie
            name, _, value = cookie.partition(";")[0].partition("=")
        for headers in ({"Cookie": f"{name}={value}"}, {"Authorization": f"Bearer {token}"}):
            async with session.get(f"{address}/", headers=headers) as index:
                assert (index.status, index.content_type) == (200, "text/html")
            async with session.get(f"{address}/api/runs", headers=headers) as found:
                runs = await found.json()
                assert [run["run_id"] for run in runs["runs"]] == ["a", "b"]
                assert found.headers["Content-Security-Policy"] == POLICY
                assert found.headers["Cache-Control"] == "no-store"


async def test_what_is_asked_is_bounded_and_named(tmp_path: Path) -> None:
    async with page(tmp_path) as (session, address, token):
        session.headers["Authorization"] = f"Bearer {token}"
        for path, status in {
            "/api/series?run=2": 400,
            "/api/series?run=-1": 400,
            "/api/nothing": 400,
            "/api/sample?step=1&key=none/0": 400,
            "/api/series?names=" + "x" * 10_000: 400,
            "/static/none.js": 404,
            "/api/runs/": 403,
        }.items():
            async with session.get(address + path) as refused:
                assert refused.status == status, path
                if path.startswith("/api/s") and len(path) < 200:
                    assert "run" in (await refused.json())["error"] or "key" in (await refused.json())["error"]
        for path in ("../secret.js", "%2e%2e/secret.js", "..%2fsecret.js", "/etc/passwd", "x%00.js"):
            async with session.get(URL(f"{address}/static/{path}", encoded=True)) as refused:
                assert refused.status in (400, 403, 404), path
                assert "secret\n" not in await refused.text()
        async with session.post(f"{address}/api/runs", data=b"x") as refused:
            assert refused.status == 403
        async with session.get(f"{address}/static/main.js") as script:
            assert script.headers["Content-Type"] == "text/javascript; charset=utf-8"
        async with session.get(f"{address}/api/samples?run=0") as found:
            assert (found.content_type, found.headers["X-Content-Type-Options"]) == ("application/json", "nosniff")
            assert json.loads(await found.text())["samples"][0]["completion"] == HOSTILE


async def test_a_folder_that_cannot_be_answered_about_is_said_and_borne(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: RunData) -> None:
        raise RuntimeError("private")

    monkeypatch.setattr(RunData, "facts", fail)
    async with page(tmp_path) as (session, address, token):
        session.headers["Authorization"] = f"Bearer {token}"
        async with session.get(f"{address}/api/runs") as found:
            assert found.status == 500
            assert (await found.json())["error"] == "this cannot be answered: RuntimeError; the log has more"
        async with session.get(f"{address}/api/metrics") as found:
            assert found.status == 200


async def test_ten_viewers_ask_once_and_the_loop_goes_on_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def slow(_self: RunData, what: str, _query: object) -> dict[str, str]:
        asked.append(what)
        time.sleep(0.3)
        return {"what": what}

    monkeypatch.setattr(RunData, "answer", slow)
    async with page(tmp_path) as (session, address, token):
        session.headers["Authorization"] = f"Bearer {token}"
        held_s = 0.0

        async def watch() -> None:
            nonlocal held_s
            loop = asyncio.get_running_loop()
            while True:
                begin_s = loop.time()
                await asyncio.sleep(0)
                held_s = max(held_s, loop.time() - begin_s)

        watching = asyncio.create_task(watch())
        found = await asyncio.gather(*(session.get(f"{address}/api/metrics") for _ in range(10)))
        watching.cancel()
        assert [answer.status for answer in found] == [200] * 10
        assert asked == ["metrics"]
        assert held_s < 0.25
        monkeypatch.setattr(answers, "MAX_WAITING", 1)
        first, second = await asyncio.gather(*(session.get(f"{address}/api/{what}") for what in ("cost", "weights")))
        assert sorted([first.status, second.status]) == [200, 503]


async def test_connections_beyond_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with page(tmp_path) as (session, address, token):
        host, port = address.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        assert await asyncio.wait_for(held[2][0].read(), 10) == b""
        for _, writer in held:
            writer.close()
            await writer.wait_closed()
        status = 0
        while status != 200:
            try:
                async with session.get(f"{address}/api/runs", headers={"Authorization": f"Bearer {token}"}) as answer:
                    status = answer.status
            except aiohttp.ClientError:
                await asyncio.sleep(0.01)


async def test_it_speaks_tls_and_takes_observers_as_configured(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "ca")
    mine = issue(authority)
    secured = Security(
        ca_file=mine.ca_file,
        cert_file=mine.cert_file,
        key_file=mine.key_file,
        accepted_tokens=(f"observer:{SECRET}", f"generator:{SECRET}"),
    )
    async with page(tmp_path, secured) as (session, address, token):
        assert address.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(mine.ca_file))
        for shown, status in ((token, 200), (f"observer:{SECRET}", 200), (f"generator:{SECRET}", 403), (SECRET, 401)):
            headers = {"Authorization": f"Bearer {shown}"}
            async with session.get(f"{address}/api/runs", headers=headers, ssl=trusted) as answer:
                assert answer.status == status, shown
        async with session.get(f"{address}/?token={token}", ssl=trusted, allow_redirects=False) as redeemed:
            assert "Secure" in redeemed.headers["Set-Cookie"]
        for role, status in ((Role.ACCESS_ROLE_OBSERVER, 200), (Role.ACCESS_ROLE_GENERATOR, 403)):
            holder = issue(authority, roles=[role_name(role)], name=role_name(role))
            with_certificate = ssl.create_default_context(cafile=str(mine.ca_file))
            with_certificate.load_cert_chain(holder.cert_file, holder.key_file)
            async with session.get(f"{address}/api/runs", ssl=with_certificate) as answer:
                assert answer.status == status, role_name(role)
    with pytest.raises(ConfigError, match="--listen"):
        async with serving_page([], "0.0.0.0:0", security=NO_SECURITY, setting="--listen"):
            pass


async def test_view_shows_a_folder_until_ctrl_c(tmp_path: Path) -> None:
    folder = page_folder(tmp_path / "r")
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "view", str(folder.path), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 50)).decode()
    address, _, token = line.removeprefix("page: ").strip().partition("/?token=")
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
        async with session.get(f"{address}/api/runs") as found:
            assert (await found.json())["runs"][0]["run_id"] == "r"
        process.send_signal(signal.SIGINT)
        _, errors = await asyncio.wait_for(process.communicate(), 20)
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize(
    ("runs", "options", "words"),
    [
        (["missing"], {}, "RUN_DIR: missing: no such folder"),
        (["."], {}, "not a run folder"),
        (["r"] * 17, {}, "at most 16"),
        (["r"], {"listen": "8080"}, "--listen: '8080'"),
        (["r"], {"listen": "0.0.0.0:0"}, "--listen"),
        (["run-1"], {"broker": "nowhere"}, "--broker"),
        (["not/an/id"], {"broker": "localhost:1"}, "neither a folder nor"),
    ],
)
def test_view_names_what_is_wrong_with_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: list[str], options: dict[str, str], words: str
) -> None:
    page_folder(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(words)):
        view_command(runs, **{"listen": "127.0.0.1:0", "broker": None, **options})
