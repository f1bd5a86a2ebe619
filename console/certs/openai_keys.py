"""Implements `penstock openai key`."""

from __future__ import annotations

import time

from console.certs.request import read_validity
from penstock.config import ConfigError
from penstock.names import is_run_id
from penstock.secret import read_secret
from penstock.security.session_keys import (
    MAX_VALID_S,
    SECRET_VARIABLE,
    SESSION_ID,
    TASK,
    Opens,
    SessionKey,
    SessionKeys,
)


def key_command(run_id: str, *, session: str, group: str, valid: str, may_reward: bool) -> int:
    """Print a key; returns the exit status. Raises ConfigError."""
    secret = read_secret(SECRET_VARIABLE)
    if secret is None:
        raise ConfigError(
            f"{SECRET_VARIABLE}: not set; set it to the generators' secret, or ask one of them: POST /v1/session_keys"
        )
    if not is_run_id(run_id):
        raise ConfigError(f"--run {run_id!r:.80}: is no run's id; name the run as its configuration does (run.id)")
    if SESSION_ID.fullmatch(session) is None:
        raise ConfigError(f"--session {session!r:.80}: must be 1 to 128 printable ASCII characters without spaces")
    if group and TASK.fullmatch(group) is None:
        raise ConfigError(f"--group {group!r:.80}: must be 1 to 64 of A-Z a-z 0-9 . _ : @ / + -")
    validity_s = read_validity(days=None, valid=valid).total_seconds()
    if validity_s > MAX_VALID_S:
        raise ConfigError(f"--valid {valid}: must be at most {MAX_VALID_S // 86_400}d; make another key then")
    key = SessionKey(
        run_id=run_id,
        session=session,
        group=group,
        expire_s=int(time.time() + validity_s),
        opens=tuple(Opens) if may_reward else (Opens.COMPLETE,),
    )
    print(SessionKeys(run_id, secret).issue(key))
    return 0
