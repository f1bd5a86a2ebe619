"""A process's credentials: mutual TLS, and a bearer token.

Secrets come from files and the environment only, never from a configuration file. Without either, servers listen
in plain text, on loopback alone unless the configuration says `insecure: true`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from pydantic import BaseModel

from penstock.config import ConfigError
from penstock.process.logger import get_logger
from penstock.secret import read_secret
from penstock.security.bearer_tokens import Tokens, check_header, check_token, read_accepted_tokens, token_interceptors
from penstock.security.certificate_files import TlsFiles, load
from penstock.security.plain_text import (
    HOW_TO_ALLOW,
    how_to_protect,
    is_allowed_by_environment,
    is_local,
    missing_halves,
    plain_listener_problem,
    plain_listener_warning,
)
from penstock.security.revocations import Revocations, revocations_beside
from penstock.security.roles import ANY, caller_of_pem
from penstock.security.tls import RenewedChannel

CLUSTER = "PENSTOCK"
"""Prefix of the variables of the cluster's own credentials."""
JUDGES = "PENSTOCK_JUDGE"
"""Prefix of the variables of credentials shown to third parties' reward models."""

ModelT = TypeVar("ModelT", bound=BaseModel)

_log = get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Credentials of this process."""

    ca_file: Path | None = None
    """Authorities trusted, PEM; turns TLS on for clients and, for servers, asks clients for a certificate."""
    cert_file: Path | None = None
    """This process's certificate, PEM; turns TLS on for servers."""
    key_file: Path | None = None
    """Its private key, PEM."""
    token: str | None = None
    """Bearer token that this process shows with every call, and accepts."""
    accepted_tokens: tuple[str, ...] = ()
    """Further tokens that its servers accept."""
    allows_plain: bool = False
    """Whether the token may be shown, and a server beyond loopback may listen, without TLS."""
    plain_listeners: list[str] = field(default_factory=list, compare=False, repr=False)
    """Where this process listens in plain text beyond loopback."""
    prefix: str = field(default=CLUSTER, compare=False)
    """Prefix of the variables that these come from; for messages."""

    @classmethod
    def from_environment(cls, prefix: str = CLUSTER, *, insecure: bool = False) -> Security:
        """What PENSTOCK_TOKEN(_FILE), PENSTOCK_ACCEPTED_TOKENS_FILE and PENSTOCK_TLS_CA, _CERT and _KEY say.

        Another prefix reads variables of that prefix only: never the cluster's, and no accepted tokens. Unset variables
        are off.

        Args:
            prefix: What the variables begin with.
            insecure: Whether plain text is allowed; PENSTOCK_INSECURE=true says so, too.

        Raises:
            ConfigError: One half of a pair is missing, one line each; a file cannot be read or used; a token
                is malformed.
        """

        def file(name: str) -> Path | None:
            value = os.environ.get(f"{prefix}_TLS_{name}")
            return Path(value) if value else None

        token = read_secret(f"{prefix}_TOKEN")
        if token is not None:
            # A third party's token may have any form.
            check = check_token if prefix == CLUSTER else check_header
            check(token, where=f"{prefix}_TOKEN")
        found = cls(
            ca_file=file("CA"),
            cert_file=file("CERT"),
            key_file=file("KEY"),
            allows_plain=insecure or is_allowed_by_environment(),
            token=token,
            accepted_tokens=read_accepted_tokens() if prefix == CLUSTER else (),
            prefix=prefix,
        )
        problems = missing_halves(found.tls_files, has_token=token is not None, allows_plain=found.allows_plain)
        if problems:
            raise ConfigError("\n".join(problems))
        load(found.tls_files)
        return found

    @property
    def serves_tls(self) -> bool:
        """Whether servers of this process speak TLS."""
        return self.cert_file is not None and self.key_file is not None

    def named(self, config: ModelT, field: str) -> ModelT:
        """The configuration with this process's name in `field`, unless it is set there or the certificate has none.

        A certificate of roles admits only ids that begin with its name.
        """
        caller = None if self.cert_file is None else caller_of_pem(self.cert_file.read_bytes())
        if caller is None or caller.is_operator or not caller.name or field in config.model_fields_set:
            return config
        return config.model_copy(update={field: caller.name})

    @property
    def run_id(self) -> str | None:
        """The one run that this process's certificate opens; None without one, or if it opens several or any."""
        caller = None if self.cert_file is None else caller_of_pem(self.cert_file.read_bytes())
        runs = set() if caller is None else {grant.run_id for grant in caller.grants}
        return runs.pop() if len(runs) == 1 and ANY not in runs else None

    @property
    def has_credentials(self) -> bool:
        """Whether anything protects this process's servers and calls."""
        return any((self.ca_file, self.cert_file, self.token, self.accepted_tokens))

    def may_fetch_from(self, url: str) -> bool:
        """Whether a request to that address keeps any credentials secret."""
        return self.allows_plain or not self.has_credentials or url.startswith("https://")

    def admit_listener(self, listen: str, *, setting: str) -> None:
        """Call before a server listens at host:port.

        Raises:
            ConfigError: See `listener_problem`.
        """
        problem = self.listener_problem(listen, setting=setting)
        if problem is not None:
            raise ConfigError(problem)
        if not self.serves_tls:
            self._note_listener(listen, setting=setting)

    def listener_problem(self, listen: str, *, setting: str) -> str | None:
        """Why a server must not listen there: in plain text beyond loopback, or while clients show tokens or speak TLS.

        Args:
            listen: host:port.
            setting: Where that comes from, for the message.
        """
        if self.serves_tls or self.allows_plain:
            return None
        if not is_local(listen):
            return plain_listener_problem(listen, setting=setting, fix=how_to_protect(self.prefix))
        if self.ca_file is not None or self.tokens:
            return (
                f"{self.prefix}_TLS_CERT: missing, so {setting} {listen} would be in plain text, where tokens must not "
                f"go and clients with certificates do not; {how_to_protect(self.prefix)}, or {HOW_TO_ALLOW}"
            )
        return None

    def admit_plain_listener(self, listen: str, *, setting: str, fix: str) -> None:
        """`admit_listener` for servers that cannot speak TLS; `fix` names the alternative. Raises ConfigError."""
        if not is_local(listen) and not self.allows_plain:
            raise ConfigError(plain_listener_problem(listen, setting=setting, fix=fix))
        self._note_listener(listen, setting=setting)

    def _note_listener(self, listen: str, *, setting: str) -> None:
        if not is_local(listen):
            self.plain_listeners.append(listen)
            _log.warning(f"{setting}: {plain_listener_warning(listen)}")

    @property
    def tokens(self) -> Tokens:
        """The tokens that servers of this process accept."""
        return Tokens([*([] if self.token is None else [self.token]), *self.accepted_tokens])

    @property
    def revocations(self) -> Revocations:
        """The certificates that servers of this process refuse."""
        return revocations_beside(self.ca_file)

    @property
    def tls_files(self) -> TlsFiles:
        """Paths of its certificates."""
        return TlsFiles(self.ca_file, self.cert_file, self.key_file, self.prefix)

    def open_channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel with these credentials. Raises ConfigError if it would show the token in plain text."""
        if self.token is not None and self.ca_file is None and not self.allows_plain:
            raise ConfigError(
                f"{self.prefix}_TLS_CA: missing, so the token would go to {target} in plain text; name the file of the "
                f"authority's certificate, or {HOW_TO_ALLOW}"
            )
        interceptors = [] if self.token is None else list(token_interceptors(self.token))
        if self.ca_file is None:
            return grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
        return RenewedChannel(
            self.tls_files,
            lambda credentials: grpc.aio.secure_channel(
                target, credentials, options=options, interceptors=interceptors
            ),
        )


NO_SECURITY = Security()
