"""Roles, and the roles of a caller by its certificate or token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from cryptography import x509
from cryptography.x509.oid import NameOID
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from penstock.errors import ForbiddenError
from penstock.v1 import access_pb2

Role = access_pb2.AccessRole
ANY = "*"
"""Matches every run, or every site, in a certificate's URI."""
URI_SCHEME = "penstock"

_PREFIX = "ACCESS_ROLE_"
_URI = re.compile(rf"{URI_SCHEME}://([A-Za-z0-9._*-]+)/([a-z]+)/([A-Za-z0-9._*-]+)")
_ROLES = {name.removeprefix(_PREFIX).lower(): value for name, value in Role.items() if value}
_NAMED_FIELDS = ("generator_id", "worker_id", "producer_id", "receiver_id", "node_id")
"""Fields in which a request names its sender."""
_PREDECESSOR = "replaces_generator_id"
"""Names a process that ended, whose rights the sender claims; may be empty."""
_FRAME, _HELLO = "frame", "hello"


class BadRoleError(ValueError):
    """A text that does not name a role, run or site."""


def parse_role(name: str) -> int:
    """The role of that name. Raises BadRoleError."""
    try:
        return _ROLES[name]
    except KeyError:
        raise BadRoleError(f"{name!r} is no role; one of {', '.join(_ROLES)}") from None


def role_name(role: int) -> str:
    """The name as users write it: "trainer"."""
    return Role.Name(role).removeprefix(_PREFIX).lower()  # type: ignore[arg-type]


def role_uri(role: str, *, run_id: str, site: str) -> str:
    """The role's URI for a certificate. Raises BadRoleError."""
    parse_role(role)
    uri = f"{URI_SCHEME}://{run_id}/{role}/{site}"
    if _URI.fullmatch(uri) is None:
        raise BadRoleError(f"run {run_id!r} and site {site!r} must be {ANY} or of letters, digits, '.', '_' and '-'")
    return uri


def allowed_roles(method: MethodDescriptor) -> frozenset[int]:
    """The roles that may make a call, besides the operator."""
    return frozenset(method.GetOptions().Extensions[access_pb2.roles])


@dataclass(frozen=True, slots=True)
class Grant:
    """A role, in one run and one site or in any."""

    role: int
    run_id: str = ANY
    site: str = ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller and its grants."""

    grants: Sequence[Grant]
    name: str = ""
    """The certificate's common name, with which its holder's ids must begin; empty for no such rule."""

    @property
    def is_operator(self) -> bool:
        """Whether it may do everything, in every run."""
        return Grant(Role.ACCESS_ROLE_OPERATOR) in self.grants

    def __str__(self) -> str:
        """For messages: "generator of run math-7b at site *"."""
        texts = [
            role_name(grant.role)
            + (f" of run {grant.run_id}" if grant.run_id != ANY else "")
            + (f" at site {grant.site}" if grant.site != ANY else "")
            for grant in self.grants
        ]
        return (f"{self.name}, " if self.name else "") + (" and ".join(texts) or "without a role")

    def restricted_to(self, roles: Iterable[int], *, what: str) -> Caller:
        """This caller with only the grants that allow `what`. Raises ForbiddenError if there are none."""
        allowed = {*roles, Role.ACCESS_ROLE_OPERATOR}
        grants = [grant for grant in self.grants if grant.role in allowed]
        if not grants:
            names = ", ".join(sorted(role_name(role) for role in allowed))
            raise ForbiddenError(f"{what} is not open to {self}; it is to: {names}", roles=names)
        return Caller(grants=grants, name=self.name)

    def sees_run(self, run_id: str) -> bool:
        """Whether a run is one of its own."""
        return any(grant.run_id in (ANY, run_id) for grant in self.grants)

    def check_run(self, run_id: str) -> None:
        """Raise ForbiddenError unless the run is its own."""
        if not self.sees_run(run_id):
            raise self.refusal("run_id", run_id)

    def refusal(self, field: str, value: str) -> ForbiddenError:
        """The error that refuses this caller another run ("run_id") or site ("site") than its own."""
        what = field.removesuffix("_id")
        return ForbiddenError(
            f"{field}: {value!r} is not open to {self}; that takes a credential of the {what}: "
            f"penstock certs issue ROLE --{what} {what.upper()}",
            field=field,
        )

    def check_message(self, message: Any) -> None:
        """Raise ForbiddenError if a request, its hello or its frame is of another run, site or name."""
        if self.is_operator or not isinstance(message, Message):
            return
        self._check_fields(message)
        carried = _carried(message)
        if carried is not None:
            self._check_fields(getattr(message, carried))

    def _check_fields(self, message: Message) -> None:
        fields, grants = message.DESCRIPTOR.fields_by_name, self.grants
        for field in ("run_id", "site"):
            if field in fields:
                value = getattr(message, field)
                grants = [grant for grant in grants if getattr(grant, field) in (ANY, value)]
                if not grants:
                    raise self.refusal(field, value)
        for field in _NAMED_FIELDS:
            if field in fields:
                self._check_name(field, getattr(message, field))
        if _PREDECESSOR in fields and getattr(message, _PREDECESSOR):
            self._check_name(_PREDECESSOR, getattr(message, _PREDECESSOR))

    def _check_name(self, field: str, value: str) -> None:
        if self.name and value != self.name and not value.startswith(f"{self.name}-"):
            raise ForbiddenError(
                f"{field}: {value!r} is not the certificate's; it must be {self.name!r}, or begin with that and '-'",
                field=field,
            )


def _carried(message: Message) -> str | None:
    """The field of a request that names its sender, if it is not the request itself."""
    if _FRAME in message.DESCRIPTOR.oneofs_by_name:
        frame: str | None = message.WhichOneof(_FRAME)
        return frame
    return _HELLO if _HELLO in message.DESCRIPTOR.fields_by_name and message.HasField(_HELLO) else None


OPERATOR = Caller(grants=(Grant(Role.ACCESS_ROLE_OPERATOR),))


def caller_of_certificate(names: Iterable[str], common_name: str) -> Caller | None:
    """The caller that a certificate with these alternative names stands for; None if none of them is a role's.

    A malformed name of our scheme grants nothing, but still makes it a certificate of roles: it is never taken for one
    that opens everything.
    """
    uris = [name for name in names if name.startswith(f"{URI_SCHEME}:")]
    if not uris:
        return None
    grants = []
    for uri in uris:
        found = _URI.fullmatch(uri)
        if found is not None and found[2] in _ROLES:
            grants.append(Grant(_ROLES[found[2]], found[1], found[3]))
    return Caller(grants=grants, name=common_name)


def caller_of_pem(certificate: bytes) -> Caller | None:
    """The caller that the first certificate of a PEM file stands for; None if it names no roles."""
    loaded = x509.load_pem_x509_certificate(certificate)
    try:
        names = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    common = [str(name.value) for name in loaded.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return caller_of_certificate(names.get_values_for_type(x509.UniformResourceIdentifier), "".join(common))


def caller_of_context(context: grpc.aio.ServicerContext[Any, Any]) -> Caller | None:
    """The caller that the peer's certificate stands for; None if it showed none, or one without roles."""
    properties = context.auth_context()
    names = [name.decode("utf-8", "replace") for name in properties.get("x509_subject_alternative_name", ())]
    common = b"".join(properties.get("x509_common_name", ())).decode("utf-8", "replace")
    return caller_of_certificate(names, common)
