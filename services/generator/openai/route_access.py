"""Decides access to the endpoint's routes: for the cluster's roles, and for agents with keys to their own sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiohttp import web

from penstock.errors import BadTokenError, ForbiddenError
from penstock.security import Security
from penstock.security.http_access import Handler, HttpAccess, route_of
from penstock.security.session_keys import PREFIX, SESSION_ID, TASK, Opens, SessionKey, SessionKeys
from services.generator.openai.endpoint import Labels
from services.generator.openai.formats.api_errors import invalid

SESSION_HEADER = "X-Penstock-Session"
GROUP_HEADER = "X-Penstock-Group"
PEERS_SESSION_HEADER = "X-Session-ID"
"""What clients of /inference/v1/generate name a session by."""
_KEY = web.RequestKey("session_key", SessionKey)
_BEARER = "Bearer "


class Doors:
    """Routes, each with the roles and keys that may use it.

    Args:
        security: Credentials of this process.
        keys: Reads agents' keys.
        now_s: Unix time.
    """

    def __init__(self, security: Security, keys: SessionKeys, *, now_s: Callable[[], float]) -> None:
        # With a secret set, agents are expected to have keys: no access without a credential.
        self.access = HttpAccess(security, always_asks=keys.is_lasting)
        self._keys = keys
        self._now_s = now_s
        self._opened: dict[str, Opens] = {}

    def add(
        self,
        app: web.Application,
        method: str,
        path: str,
        handler: Handler,
        *,
        roles: Iterable[int],
        key: Opens | None = None,
    ) -> None:
        """Add a route that is open to these roles, and to agents' keys that open `key`."""
        route = self.access.add(app, method, path, handler, roles=roles)
        if key is not None:
            self._opened[route] = key

    def admit(self, request: web.Request) -> None:
        """Raises BadTokenError or ForbiddenError if a request may not pass."""
        given = request.headers.get("Authorization", "").removeprefix(_BEARER)
        if given.startswith(PREFIX):
            self._admit_agent(request, given)
            return
        try:
            self.access.admit(request)
        except BadTokenError as error:
            raise BadTokenError("missing or wrong API key; use one of POST /v1/session_keys") from error

    def _admit_agent(self, request: web.Request, given: str) -> None:
        key = self._keys.read(given, now_s=self._now_s())
        route = route_of(request)
        opens = self._opened.get(route)
        if opens is None or opens not in key.opens:
            raise ForbiddenError(f"{route} is not open to {key}, which opens {' and '.join(sorted(key.opens))}")
        request[_KEY] = key


def labels_of(request: web.Request, *, session_header: str = SESSION_HEADER) -> Labels | None:
    """The session that a request names; with an agent's key there always is one. Raises ApiError, ForbiddenError.

    `session_header` names it where SESSION_HEADER does not.
    """
    key = request.get(_KEY)
    named = {request.headers[name] for name in (SESSION_HEADER, session_header) if name in request.headers}
    if len(named) > 1:
        raise invalid(session_header, f"names another session than {SESSION_HEADER}; leave one out")
    session_id, task = next(iter(named), None), request.headers.get(GROUP_HEADER, "")
    if task and TASK.fullmatch(task) is None:
        raise invalid(GROUP_HEADER, f"{task!r:.80}; 1 to 64 of A-Z a-z 0-9 . _ : @ / + -")
    if key is not None:
        session_id = session_id or key.only_session
        if session_id is None:
            raise invalid(SESSION_HEADER, f"missing; {key} opens several")
        task = key.task(task)
    if session_id is None:
        if task:
            raise invalid(GROUP_HEADER, f"set without {SESSION_HEADER}")
        return None
    return Labels(session_id=checked_session(request, session_id, Opens.COMPLETE), task=task)


def checked_session(request: web.Request, session_id: str, opens: Opens) -> str:
    """The session id; raises ApiError if it is malformed, ForbiddenError if it is not open to the request's key."""
    if SESSION_ID.fullmatch(session_id) is None:
        raise invalid(SESSION_HEADER, f"{session_id!r:.80}; 1 to 128 printable ASCII characters without spaces")
    key = request.get(_KEY)
    if key is not None:
        key.check(session_id, opens)
    return session_id
