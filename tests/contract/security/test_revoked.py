"""A revoked certificate: refused by gRPC and HTTP servers without a restart, and by its machine's own check."""

from __future__ import annotations

import shutil

import aiohttp
import pytest
import yaml

from console.certs.commands import revoke_command
from console.deploy.machine_check import check_machine
from penstock.config import ConfigError
from penstock.errors import BadTokenError, UnknownRunError
from penstock.network import rpc
from penstock.security.revocations import REVOKED_FILE, Revocations
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.contract.security.test_http_access import ask as http_ask
from tests.contract.security.test_http_access import weights
from tests.helpers.certificates import issue, make_authority
from tests.helpers.serving import serving


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    async def GetPlan(self, _request, _context):
        raise UnknownRunError("r", run_id="r")


async def _status(base, holder):
    async with aiohttp.ClientSession() as session:
        return await http_ask(session, "GET", f"{base}/weights/r/content", of=holder)


async def test_a_revoked_certificate_is_refused_in_one_line_and_a_new_one_of_the_same_holder_is_not(
    tmp_path, monkeypatch, capsys
):
    authority = make_authority(tmp_path / "authority")
    server = issue(authority, name="server")
    revoked, other = (issue(authority, roles=["generator"], name=name) for name in ("gpu-1", "gpu-2"))

    async def ask(channel):
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        with pytest.raises(UnknownRunError):
            await rpc.call(stub.GetPlan, scheduler_pb2.GetPlanRequest(run_id="r"), peer="scheduler")

    async with (
        serving(rpc.service_of(Scheduler()), security=server) as (_, target),
        weights(server) as base,
        rpc.open_channel(target, revoked) as channel,
        rpc.open_channel(target, other) as beside,
    ):
        await ask(channel)
        assert (await _status(base, revoked))[0] == 200

        assert revoke_command("gpu-1", directory=authority) == 0
        shutil.copy(authority / REVOKED_FILE, server.ca_file.with_name(REVOKED_FILE))
        line = "the certificate of 'gpu-1' .* was revoked; issue its holder another one with: penstock certs issue"
        with pytest.raises(BadTokenError, match=line):
            await ask(channel)
        status, text = await _status(base, revoked)
        assert (status, "was revoked; issue its holder another one" in text) == (401, True)
        await ask(beside)
        assert (await _status(base, other))[0] == 200

        # Its machine says so before anything starts there, if it has the list.
        shutil.copy(authority / REVOKED_FILE, revoked.ca_file.with_name(REVOKED_FILE))
        for name in ("ca", "cert", "key"):
            monkeypatch.setenv(f"PENSTOCK_TLS_{name.upper()}", str(getattr(revoked, f"{name}_file")))
        described = {"name": "gpu-1", "run_id": "r", "site": "s", "role": "generator", "host": "127.0.0.1"}
        (tmp_path / "machine.yaml").write_text(yaml.safe_dump(described))
        (problem,) = check_machine(tmp_path / "machine.yaml")
        assert "gpu-1: PENSTOCK_TLS_CERT: " in problem
        assert "was revoked; issue its holder another one" in problem

        again = issue(authority, roles=["generator"], name="gpu-1")
        async with rpc.open_channel(target, again) as renewed:
            await ask(renewed)
        assert (await _status(base, again))[0] == 200
    with pytest.raises(ConfigError, match="has issued it no certificate that is valid"):
        revoke_command("gpu-9", directory=authority)
    assert "Copy it beside the ca.pem of every machine" in capsys.readouterr().out


def test_a_list_that_cannot_be_read_leaves_the_one_before_in_force(tmp_path):
    path = tmp_path / REVOKED_FILE
    path.write_text("ff gpu-1\n")
    revocations = Revocations(path)
    with pytest.raises(BadTokenError, match="'gpu-1'"):
        revocations.check(255)
    path.write_text("not hexadecimal\n")
    with pytest.raises(BadTokenError, match="'gpu-1'"):
        revocations.check(255)
    revocations.check(254)
    path.unlink()
    revocations.check(255)
