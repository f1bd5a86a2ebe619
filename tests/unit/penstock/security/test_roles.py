"""What a certificate or a token makes its holder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import ConfigError
from penstock.errors import ForbiddenError
from penstock.security import Security
from penstock.security.bearer_tokens import Tokens, caller_of_token
from penstock.security.roles import BadRoleError, Role, caller_of_certificate, role_name, role_uri
from penstock.v1 import broker_pb2 as pb
from penstock.v1 import weights_pb2

SECRET = "0123456789abcdef"
GENERATOR = Role.ACCESS_ROLE_GENERATOR


def _generator(name: str = "", run_id: str = "math", site: str = "north"):
    caller = caller_of_certificate([f"penstock://{run_id}/generator/{site}"], name)
    assert caller is not None
    return caller


def _hello(**fields: str) -> pb.StreamLeasesRequest:
    values = {"run_id": "math", "site": "north", "generator_id": "gpu-1-ab"} | fields
    return pb.StreamLeasesRequest(hello=pb.GeneratorHello(**values))


def test_a_token_without_a_head_is_the_operators():
    assert caller_of_token("anything").is_operator


def test_a_token_says_its_roles_and_its_run():
    caller = caller_of_token(f"generator+environment@math:{SECRET}")
    assert [role_name(grant.role) for grant in caller.grants] == ["generator", "environment"]
    assert caller.sees_run("math")
    assert not caller.sees_run("other")
    assert not caller.is_operator


@pytest.mark.parametrize("token", ["writer:" + SECRET, ":" + SECRET, "generator:short", "generator+:" + SECRET])
def test_a_token_whose_head_is_wrong_is_never_an_operators(token):
    with pytest.raises(BadRoleError) as caught:
        caller_of_token(token)
    assert SECRET not in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_before_a_colon_makes_an_operator_but_the_role(head):
    try:
        caller = caller_of_token(f"{head}:{SECRET}")
    except BadRoleError:
        return
    assert not caller.is_operator or "operator" in head


def test_a_wrong_token_of_the_process_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("PENSTOCK_TOKEN", f"writer:{SECRET}")
    with pytest.raises(ConfigError, match=r"PENSTOCK_TOKEN: .writer. is no role") as caught:
        Security.from_environment()
    assert SECRET not in str(caught.value)


def test_further_tokens_are_read_from_a_file(monkeypatch, tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# generators\ngenerator:{SECRET}\n\nreward:{SECRET}\n")
    monkeypatch.setenv("PENSTOCK_ACCEPTED_TOKENS_FILE", str(path))
    assert Security.from_environment().accepted_tokens == (f"generator:{SECRET}", f"reward:{SECRET}")
    path.write_text("generator:short")
    with pytest.raises(ConfigError, match="token 1 of"):
        Security.from_environment()


def test_tokens_are_distinguished():
    tokens = Tokens(["plain", f"generator:{SECRET}"])
    caller = tokens.caller(f"Bearer generator:{SECRET}")
    assert caller is not None
    assert not caller.is_operator
    assert [tokens.caller(text) for text in ("Bearer wrong", "plain", "")] == [None, None, None]


def test_a_certificate_without_our_names_says_nothing_and_one_with_a_broken_name_grants_nothing():
    assert caller_of_certificate(["generator.example", "127.0.0.1"], "x") is None
    for uri in ("penstock://math/operatr/north", "penstock:operator", "penstock://math/operator", "penstock://a/b/c/d"):
        caller = caller_of_certificate([uri], "x")
        assert caller is not None
        assert not caller.grants
        with pytest.raises(ForbiddenError, match="without a role"):
            caller.restricted_to({GENERATOR}, what="a call")


def test_uris_round_trip_and_bad_parts_are_refused():
    assert caller_of_certificate([role_uri("operator", run_id="*", site="*")], "").is_operator
    for run_id, site in (("a/b", "x"), ("", "x"), ("a", "x y"), ("a", "")):
        with pytest.raises(BadRoleError):
            role_uri("trainer", run_id=run_id, site=site)


def test_a_call_is_open_to_its_roles_and_the_operator_alone():
    assert _generator().restricted_to({GENERATOR}, what="a call").grants
    with pytest.raises(ForbiddenError, match="open to generator of run math at site north; it is to: operator, train"):
        _generator().restricted_to({Role.ACCESS_ROLE_TRAINER}, what="a call")
    assert caller_of_token("x").restricted_to((), what="a call").is_operator


def test_requests_of_another_run_site_or_name_are_refused():
    caller = _generator(name="gpu-1")
    caller.check_message(_hello())
    caller.check_message(pb.StreamTokensRequest(run_id="math", generator_id="gpu-1"))
    caller.check_message(pb.StreamLeasesRequest(beat=pb.GeneratorBeat()))
    for fields in ({"run_id": "other"}, {"site": "south"}, {"generator_id": "gpu-12"}, {"generator_id": "gpu-2-ab"}):
        with pytest.raises(ForbiddenError, match=next(iter(fields))):
            caller.check_message(_hello(**fields))
    with pytest.raises(ForbiddenError, match="generator_id"):
        caller.check_message(pb.StreamTokensRequest(run_id="math", generator_id="gpu-2"))
    with pytest.raises(ForbiddenError, match="receiver_id"):
        caller.check_message(weights_pb2.FindSourcesRequest(run_id="math", site="north", receiver_id="gpu-3"))


def test_run_and_site_must_come_from_one_grant():
    caller = caller_of_certificate(["penstock://math/generator/north", "penstock://code/generator/south"], "")
    caller.check_message(_hello(run_id="code", site="south"))
    with pytest.raises(ForbiddenError, match="site"):
        caller.check_message(_hello(run_id="code", site="north"))
