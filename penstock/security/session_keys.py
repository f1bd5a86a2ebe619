"""API keys of agents: each opens some sessions of one run, for a limited time, and nothing else.

A key states what it opens, and is signed with a secret that all generators of a run share: nothing is stored, every
generator accepts it, and it survives their restarts. Holders of the secret can make keys; changing it ends them all.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from penstock.config import ConfigError
from penstock.errors import BadTokenError, ForbiddenError

PREFIX = "sk-penstock-"
SECRET_VARIABLE = "PENSTOCK_OPENAI_SECRET"
MIN_SECRET_CHARS = 32
MAX_VALID_S = 30 * 86_400
SESSION_ID = re.compile(r"[\x21-\x7e]{1,128}")
MANY = "*"
TASK = re.compile(r"[A-Za-z0-9._:@/+-]{1,64}")
_PURPOSE = b"penstock session key 1\n"


class Opens(StrEnum):
    """What a key may do in its sessions."""

    COMPLETE = "complete"
    """Ask for completions."""
    REWARD = "reward"
    """End them with a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """What a key opens."""

    run_id: str
    session: str
    """A session id; with a trailing "*", all sessions whose ids begin with what precedes it."""
    group: str = ""
    """The task of all its sessions; empty: the agent chooses, within the same names."""
    expire_s: int
    """Unix time, s."""
    opens: Collection[Opens] = (Opens.COMPLETE,)

    def __str__(self) -> str:
        """For messages."""
        return f"the key of session {self.session!r}"

    def covers(self, name: str) -> bool:
        """Whether a session or a task of that name is its own."""
        return name.startswith(self.session[:-1]) if self.session.endswith(MANY) else name == self.session

    @property
    def only_session(self) -> str | None:
        """The session, where it is one."""
        return None if self.session.endswith(MANY) else self.session

    def check(self, session_id: str, opens: Opens) -> None:
        """Raise ForbiddenError unless the key opens that."""
        if not self.covers(session_id):
            raise ForbiddenError(f"session {session_id!r:.140} is not open to {self}", field="session")
        if opens not in self.opens:
            raise ForbiddenError(f"{self} opens {' and '.join(sorted(self.opens))}, not {opens}", field="opens")

    def task(self, asked: str) -> str:
        """The task of a session that asks for one, or for none. Raises ForbiddenError."""
        if self.group and asked in ("", self.group):
            return self.group
        if self.group or (asked and not self.covers(asked)):
            own = f"use {self.group!r}" if self.group else "have a key that names its group"
            raise ForbiddenError(f"group {asked!r:.80} is not open to {self}; leave it out, or {own}", field="group")
        return asked


class SessionKeys:
    """Makes and reads keys of one run.

    Args:
        run_id: The run.
        secret: Signs keys; without one a random secret is used, and keys end with the process.
    """

    def __init__(self, run_id: str, secret: str | None) -> None:
        if secret is not None and len(secret) < MIN_SECRET_CHARS:
            raise ConfigError(
                f"{SECRET_VARIABLE}: has {len(secret)} characters; it must have {MIN_SECRET_CHARS} or more; "
                "make one with `openssl rand -hex 32`"
            )
        self.run_id = run_id
        self.is_lasting = secret is not None
        """Whether keys outlive the process."""
        self._secret = (secret or secrets.token_hex(32)).encode()

    def issue(self, key: SessionKey) -> str:
        """The key as text."""
        fields = [key.run_id, key.session, key.group, key.expire_s, sorted(key.opens)]
        return self._signed(base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("="))

    def read(self, text: str, *, now_s: float) -> SessionKey:
        """What a key opens; takes the same time whatever is wrong with it. Raises BadTokenError."""
        body = text.removeprefix(PREFIX).partition(".")[0]
        if not hmac.compare_digest(self._signed(body).encode(), text.encode("utf-8", "replace")):
            raise BadTokenError("API key: this endpoint did not make it, or its secret has changed since")
        run_id, session, group, expire_s, opens = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        key = SessionKey(
            run_id=run_id, session=session, group=group, expire_s=expire_s, opens=tuple(Opens(each) for each in opens)
        )
        if key.run_id != self.run_id:
            raise BadTokenError(f"API key: it is for run {key.run_id!r}; this is {self.run_id!r}")
        if key.expire_s <= now_s:
            raise BadTokenError(
                f"API key: it expired at {datetime.fromtimestamp(key.expire_s, UTC):%Y-%m-%d %H:%M:%SZ}"
            )
        return key

    def _signed(self, body: str) -> str:
        mac = hmac.digest(self._secret, _PURPOSE + body.encode("utf-8", "replace"), hashlib.sha256)
        return f"{PREFIX}{body}.{mac.hex()}"
