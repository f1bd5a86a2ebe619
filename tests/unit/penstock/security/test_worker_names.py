"""The name of a process: what its certificate says, where its configuration says nothing."""

from __future__ import annotations

import pytest

from penstock.errors import ForbiddenError
from penstock.security import NO_SECURITY, Security
from penstock.security.roles import caller_of_pem
from penstock.v1 import broker_pb2 as pb
from services.reward.config import RewardConfig
from tests.helpers.certificates import issue, make_authority, make_security


@pytest.fixture
def of_machine(tmp_path) -> Security:
    return issue(make_authority(tmp_path), roles=["reward"], run="math", site="north", name="gpu-1")


def _config(**settings: str) -> RewardConfig:
    return RewardConfig.model_validate({"run_id": "math", "reward": {"trusts_generator_text": True}} | settings)


def test_a_worker_is_named_by_its_certificate_and_let_through_under_that_name(of_machine):
    worker_id = of_machine.named(_config(), "worker_id").worker_id
    assert worker_id == "gpu-1"
    caller = caller_of_pem(of_machine.cert_file.read_bytes())
    caller.check_message(pb.StreamScoringRequest(hello=pb.RewardHello(run_id="math", worker_id=worker_id)))
    default = _config().worker_id
    with pytest.raises(ForbiddenError, match=default):
        caller.check_message(pb.StreamScoringRequest(hello=pb.RewardHello(run_id="math", worker_id=default)))


def test_a_name_that_is_set_stays(of_machine):
    config = _config(worker_id="gpu-1-b")
    assert of_machine.named(config, "worker_id").worker_id == "gpu-1-b"


def test_without_a_certificate_of_roles_the_default_stays(tmp_path):
    config = _config()
    operator = issue(make_authority(tmp_path / "authority"), name="admin")
    for security in (NO_SECURITY, make_security(tmp_path), operator):
        assert security.named(config, "worker_id") is config
