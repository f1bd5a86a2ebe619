"""Every HTTP route of every listener times every role, by tokens and by certificates."""

from __future__ import annotations

import asyncio
import itertools
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from console.page.server import serving_page
from console.probe.link_server import Peer, serving_transfers
from penstock.network.metrics_server import serve_metrics
from penstock.security import NO_SECURITY, Security
from penstock.security.http_access import HttpAccess
from penstock.security.roles import Role, role_name
from penstock.transfer.content_server import serving_contents
from tests.helpers.certificates import issue, make_authority
from tests.helpers.generators.openai_endpoint import endpoint_bench, save_chat_model
from tests.helpers.ports import free_address

ROOT = Path(__file__).resolve().parents[3]
ROLES = [role for role in Role.values() if role]
TOKENS = {role: f"{role_name(role)}:{role_name(role)}-0123456789abcdef" for role in ROLES}
OF_RUN, OF_OTHER_RUN = "generator@r:0123456789abcdef", "generator@code:0123456789abcdef"
SECURED = Security(token="the-operators", accepted_tokens=(*TOKENS.values(), OF_RUN, OF_OTHER_RUN), allows_plain=True)

WEIGHTS = {("GET", "/weights/{run_id}/{name}"): {"generator"}}
METRICS = {("GET", "/metrics"): {"observer"}}
PROBE = {
    ("GET", "/probe/machine"): {"generator", "trainer"},
    ("GET", "/probe/bytes"): {"generator", "trainer"},
    ("POST", "/probe/bytes"): {"generator", "trainer"},
}
PAGE = {("GET", path): {"observer"} for path in ("/", "/static/{name}", "/api/{what}")}
OPENAI = {
    ("POST", "/v1/chat/completions"): {"environment"},
    ("POST", "/v1/completions"): {"environment"},
    ("POST", "/inference/v1/generate"): {"environment"},
    ("GET", "/v1/models"): {"environment"},
    ("GET", "/v1/models/{name}"): {"environment"},
    ("POST", "/v1/sessions/{id}/reward"): {"environment"},
    ("GET", "/v1/sessions/{id}"): {"environment"},
    ("DELETE", "/v1/sessions/{id}"): {"environment"},
    ("POST", "/v1/session_keys"): {"environment"},
    ("GET", "/health"): {"anybody"},
}
Listener = Callable[[Security], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def weights(security: Security, **settings: str) -> AsyncIterator[str]:
    async with serving_contents(
        lambda *_: ROOT / "LICENSE", listen="127.0.0.1:0", setting="listen", security=security, **settings
    ) as base:
        yield base


@asynccontextmanager
async def metrics(security: Security) -> AsyncIterator[str]:
    address = free_address()
    serve_metrics(address, security)
    yield f"{'http' if security.cert_file is None else 'https'}://{address}"


@asynccontextmanager
async def probe(security: Security) -> AsyncIterator[str]:
    async with serving_transfers("127.0.0.1:0", Peer(name="m", site="s"), security=security) as base:
        yield base


@asynccontextmanager
async def page(security: Security) -> AsyncIterator[str]:
    async with serving_page([], "127.0.0.1:0", security=security, setting="--listen") as link:
        yield link.partition("/?")[0]


@asynccontextmanager
async def openai(security: Security) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        # The broker behind it takes the endpoint's certificate: its calls are answered at once, not retried in vain.
        broker_security = security if security.cert_file is not None else NO_SECURITY
        async with endpoint_bench(
            save_chat_model(Path(folder)), security=security, broker_security=broker_security
        ) as bench:
            yield bench.base_url.removesuffix("/v1")


LISTENERS = {
    "weights": (weights, WEIGHTS),
    "metrics": (metrics, METRICS),
    "openai": (openai, OPENAI),
    "probe": (probe, PROBE),
    "page": (page, PAGE),
}


@pytest.fixture(params=LISTENERS)
def listener(request):
    return LISTENERS[request.param]


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return make_authority(tmp_path_factory.mktemp("authority"))


async def ask(
    session: aiohttp.ClientSession, method: str, url: str, *, token: str | None = None, of: Security = NO_SECURITY
) -> tuple[int, str]:
    """Status and text of an answer."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    tls = None
    if url.startswith("https"):
        tls = ssl.create_default_context(cafile=str(of.ca_file))
        if of.cert_file is not None:
            tls.load_cert_chain(of.cert_file, of.key_file)
    async with session.request(method, url, headers=headers, ssl=True if tls is None else tls) as answer:
        return answer.status, (await answer.text()).strip()


def urls(base: str, routes: dict[tuple[str, str], set[str]]) -> list[tuple[str, str, str, set[str]]]:
    """Each route's method, path, an address of it, and the roles that it is open to."""
    values = {"run_id": "r", "id": "s", "name": "c", "what": "runs"}
    return [
        (method, path, base + re.sub(r"\{(\w+)[^}]*\}", lambda found: values[found[1]], path), roles)
        for (method, path), roles in routes.items()
    ]


def is_let_through(status: int) -> bool:
    """Whether the route itself answered."""
    return status not in (401, 403)


async def test_every_route_times_every_role_by_tokens(listener):
    serving, routes = listener
    async with serving(SECURED) as base, aiohttp.ClientSession() as session:
        for (method, path, url, roles), role in itertools.product(urls(base, routes), ROLES):
            may = role == Role.ACCESS_ROLE_OPERATOR or role_name(role) in roles or "anybody" in roles
            status, text = await ask(session, method, url, token=TOKENS[role])
            assert is_let_through(status) == may, (method, path, role_name(role), text)
            if not may:
                assert status == 403
                allowed = ", ".join(sorted({*roles, "operator"}))
                assert f"{method} {path} is not open to {role_name(role)}; it is to: {allowed}" in text
                assert len(text.splitlines()) == 1
        for (method, _, url, roles), token in itertools.product(urls(base, routes), (None, "wrong", f"x{TOKENS[1]}")):
            status, text = await ask(session, method, url, token=token)
            assert is_let_through(status) if "anybody" in roles else status == 401, (url, token)
            assert "0123456789abcdef" not in text


async def test_every_route_times_every_role_by_certificates(listener, authority):
    serving, routes = listener
    async with serving(issue(authority, name="server")) as base, aiohttp.ClientSession() as session:
        for role in ROLES:
            of = issue(authority, roles=[role_name(role)], name=f"a-{role_name(role)}")
            for method, path, url, roles in urls(base, routes):
                may = role == Role.ACCESS_ROLE_OPERATOR or role_name(role) in roles or "anybody" in roles
                status, text = await ask(session, method, url, of=of)
                assert is_let_through(status) == may, (method, path, role_name(role), text)
                assert may or f"is not open to a-{role_name(role)}, {role_name(role)}; it is to: " in text
        stranger = Security(ca_file=of.ca_file)
        for method, _, url, roles in urls(base, routes):
            try:
                status, _ = await ask(session, method, url, of=stranger)
            except (aiohttp.ClientConnectionError, ConnectionError):
                # Where a certificate must be shown, hands are not even shaken.
                continue
            assert is_let_through(status) if "anybody" in roles else status == 401


async def test_a_run_that_is_not_the_callers_is_refused():
    async with weights(SECURED) as base, aiohttp.ClientSession() as session:
        assert (await ask(session, "GET", f"{base}/weights/r/c", token=OF_RUN))[0] == 200
        status, text = await ask(session, "GET", f"{base}/weights/r/c", token=OF_OTHER_RUN)
        fix = "that takes a credential of the run: penstock certs issue ROLE --run RUN"
        assert (status, text) == (403, f"run_id: 'r' is not open to generator of run code; {fix}")


async def test_a_relay_serves_its_own_site_only(authority):
    server = issue(authority, roles=["generator"], site="here", name="relay")
    async with weights(server, site="here") as base, aiohttp.ClientSession() as session:
        for site, expected in (("here", 200), ("*", 200), ("there", 403)):
            of = issue(authority, roles=["generator"], site=site, name="peer")
            assert (await ask(session, "GET", f"{base}/weights/r/c", of=of))[0] == expected


async def test_heads_and_what_is_no_route_are_guarded_too():
    async with weights(SECURED) as base, aiohttp.ClientSession() as session:
        observer = TOKENS[Role.ACCESS_ROLE_OBSERVER]
        for method, path in (("HEAD", "/weights/r/c"), ("GET", "/other"), ("POST", "/weights/r/c"), ("PATCH", "/")):
            assert (await ask(session, method, base + path))[0] == 401
            assert (await ask(session, method, base + path, token=observer))[0] == 403
        assert (await ask(session, "HEAD", f"{base}/weights/r/c", token="the-operators"))[0] == 200
        assert (await ask(session, "GET", f"{base}/other", token="the-operators"))[0] == 404


async def test_metrics_answer_others_while_a_client_is_slow_to_shake_hands(authority):
    of = issue(authority, roles=["observer"], name="prometheus")
    async with metrics(of) as base:
        _, slow = await asyncio.open_connection("127.0.0.1", int(base.rpartition(":")[2]))
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
                status, text = await ask(session, "GET", f"{base}/metrics", of=of)
        finally:
            slow.close()
    assert status == 200
    assert "# TYPE" in text


def test_every_route_is_added_with_its_roles():
    """Routes are added in one place, which asks for roles; other servers than those walked above do not exist."""
    sources = [path for folder in ("penstock", "services", "console") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sources}

    def files_with(pattern: str) -> list[str]:
        return sorted(name for name, text in texts.items() if re.search(pattern, text))

    adders = r"\.add_(get|post|put|patch|delete|head|view|route|static|routes|subapp|resource)\("
    assert files_with(adders) == ["penstock/security/http_access.py"]
    assert files_with(r"web\.Application\(") == [
        "console/page/server.py",
        "console/probe/link_server.py",
        "penstock/transfer/content_server.py",
        "services/generator/openai/app.py",
    ]
    assert files_with(r"HTTPServer\b|start_http_server|make_wsgi_app|asyncio\.start_server|uvicorn") == [
        "penstock/network/metrics_server.py"
    ]


@pytest.mark.parametrize("name", ["weights", "openai", "probe", "page"])
async def test_the_routes_are_those_written_here(monkeypatch, name):
    stated: dict[tuple[str, str], set[str]] = {}
    add = HttpAccess.add

    def noted(self, app, method, path, handler, *, roles):
        route = add(self, app, method, path, handler, roles=roles)
        stated[method, route.partition(" ")[2]] = {role_name(role) if role else "anybody" for role in roles}
        return route

    monkeypatch.setattr(HttpAccess, "add", noted)
    serving, routes = LISTENERS[name]
    async with serving(NO_SECURITY):
        assert stated == routes


def test_the_security_page_lists_every_route():
    page = (ROOT / "docs" / "security.md").read_text()
    assert set(re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", page)) == {*WEIGHTS, *METRICS, *OPENAI, *PROBE, *PAGE}


def test_services_without_routes_of_their_own_do_without_aiohttp():
    """Their images do not have it."""
    services = ", ".join(f"services.{name}.server" for name in ("broker", "scheduler", "reward"))
    code = f"import sys; sys.modules['aiohttp'] = None; import {services}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
