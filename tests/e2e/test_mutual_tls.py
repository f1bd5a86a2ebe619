"""The quick start's model is trained with everything under mutual TLS, and no credential passes in the clear."""

from __future__ import annotations

from contextlib import ExitStack

import grpc
import pytest

from penstock.network.rpc import open_channel
from penstock.v1 import broker_pb2_grpc, critic_pb2, critic_pb2_grpc
from tests.e2e.runs import RUN_ID, assert_balanced, running, service, small_run, wait_for_listeners
from tests.helpers.certificates import issue, make_authority
from tests.helpers.ports import free_addresses
from tests.helpers.proxies.tls_proxy import TLS_HANDSHAKE, recording

TOKEN = "open-sesame-and-nothing-else"
SECRETS = (TOKEN.encode(), b"authorization", b"bearer")
NUM_STEPS = 2
SERVICES = ("broker", "scheduler", "reward", "scorer", "critic", "trainer", "generator")
ROLES = {"scheduler": "broker", "scorer": "reward", "critic": "observer"}
"""Of a service's certificate, where it is not its own name. A critic makes no calls: the least role is enough."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def credentials(security):
    """Environment variables of a process that has these files."""
    files = {"CA": security.ca_file, "CERT": security.cert_file, "KEY": security.key_file}
    return {**{f"PENSTOCK_TLS_{name}": str(path) for name, path in files.items()}, "PENSTOCK_TOKEN": TOKEN}


def quick_run(task, folder, **settings):
    """Two steps of 4 x 4 samples."""
    document = small_run(
        task,
        folder,
        run__num_steps=NUM_STEPS,
        run__num_eval_prompts=4,
        algorithm__prompts_per_step=4,
        sampling__max_new_tokens=32,
        **settings,
    )
    # Weights come by relays, too.
    return {**document, "site": "here"}


@pytest.fixture
def certificate(tmp_path):
    """Makes one of a role, as `penstock certs issue` does."""
    authority = make_authority(tmp_path / "authority")

    def make(role, name):
        role = ROLES.get(role, role)
        run = "*" if role in ("operator", "broker") else RUN_ID
        return issue(authority, roles=[role], run=run, name=name, token=TOKEN)

    return make


@pytest.mark.grid
def test_a_run_trains_by_one_certificate(task, tmp_path, certificate, monkeypatch):
    for name, value in credentials(certificate("operator", "anna")).items():
        monkeypatch.setenv(name, value)
    listen = dict(zip(("openai", "weights"), free_addresses(2), strict=True))
    document = quick_run(task, tmp_path, generator__openai_listen=listen["openai"])
    # Others reach this one: without certificates it is refused.
    document["listen"] = {"weights": listen["weights"].replace("127.0.0.1", "0.0.0.0")}
    with running(document, tmp_path) as run:
        assert run.end() == 0, run.text
        summary = run.summary()
        logs = "".join(path.read_text() for path in (run.folder.path / "logs").glob("*.log"))
    assert_balanced(summary, num_samples=NUM_STEPS * 4 * 4)
    assert f"https://{listen['openai']}/v1" in logs
    assert "in plain text" not in logs + run.text
    assert TOKEN not in logs + run.text


async def refused(answer, kind):
    """The call is refused by the role of that service's certificate."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await answer
    assert refusal.value.code() == grpc.StatusCode.PERMISSION_DENIED
    assert f"is not open to {kind}, {ROLES.get(kind, kind)} of run {RUN_ID}; it is to" in refusal.value.details()


async def assert_roles_are_kept_apart(certificate, *, broker, critic):
    """Only trainers call a critic, and only scorers and reward workers score."""
    opening = critic_pb2.OpenCriticRequest(run_id=RUN_ID, instance_id="another")
    for kind in ("generator", "reward", "scorer"):
        async with open_channel(critic, certificate(kind, kind)) as channel:
            await refused(critic_pb2_grpc.CriticServiceStub(channel).OpenCritic(opening), kind)
    for kind in ("generator", "critic", "trainer"):
        async with open_channel(broker, certificate(kind, kind)) as channel:
            await refused(broker_pb2_grpc.BrokerServiceStub(channel).StreamScoring().read(), kind)


def service_settings(task, folder, *, own, reached):
    """The configuration of every service, but for where it listens; others are called where they are `reached`."""
    model = {"model_path": str(task.model_dir)}
    return {
        "broker": {"redis_url": "memory://", "scheduler": reached["scheduler"]},
        "scheduler": {},
        "reward": {
            "run_id": RUN_ID,
            "worker_id": "reward-0",
            "broker": reached["broker"],
            "tokenizer_path": str(task.model_dir),
            "reward": {"model": "exact_match"},
        },
        "scorer": {"run_id": RUN_ID, "worker_id": "scorer-0", "broker": reached["broker"], "device": "cpu", **model},
        "critic": {"run_id": RUN_ID, "state_dir": str(folder / "critic"), "device": "cpu", **model},
        "trainer": {
            "weights_listen": own["weights"],
            "weights_url": reached["weights"],
            "state_dir": None,
            "allowed_roots": [str(folder), str(task.model_dir.parent)],
        },
        "generator": {
            "generator_id": "gen-0",
            "site": "here",
            "run_id": RUN_ID,
            "broker": reached["broker"],
            "weights": reached["trainer"],
            **model,
            "dtype": "float32",
            "cache_dir": str(folder / "cache"),
            "engine": {"engine": "transformers", "max_concurrent_samples": 32, "num_threads": 1},
        },
    }


async def test_services_train_by_certificates_of_their_roles_and_no_credential_passes_in_the_clear(
    task, tmp_path, certificate, monkeypatch
):
    own = dict(zip((*SERVICES, "weights"), free_addresses(len(SERVICES) + 1), strict=True))
    # A scorer is never called.
    scorer_listens = own.pop("scorer")
    document = quick_run(
        task,
        tmp_path,
        algorithm__name="ppo",
        algorithm__kl_coefficient=0.05,
        algorithm__reference="service",
        algorithm__critic="service",
    )
    document["scorers"] = 0
    with ExitStack() as stack:
        at = stack.enter_context(recording(own, SECRETS))
        reached = {name: recorder.address for name, recorder in at.items()}
        settings = service_settings(task, tmp_path, own=own, reached=reached)
        listen = {**own, "scorer": scorer_listens}
        for kind in SERVICES:
            env = credentials(certificate(kind, {"generator": "gen"}.get(kind, kind)))
            stack.enter_context(service(kind, {"listen": listen[kind], **settings[kind]}, tmp_path, **env))
        for name, value in credentials(certificate("operator", "anna")).items():
            monkeypatch.setenv(name, value)
        wait_for_listeners(own.values())
        document["endpoints"] = {name: reached[name] for name in ("broker", "scheduler", "reward", "trainer", "critic")}
        document["endpoints"]["generators"] = [reached["generator"]]
        with running(document, tmp_path) as run:
            status = run.end()
            logs = {kind: (tmp_path / f"{kind}.log").read_text()[-3000:] for kind in SERVICES}
            assert status == 0, f"{run.text}\n{logs}"
            assert_balanced(run.summary(), num_samples=NUM_STEPS * 4 * 4)
            # Without a scorer's log-probs no group would have been ready.
            assert "loss/value_loss" in run.metrics()[-1]
            await assert_roles_are_kept_apart(certificate, broker=reached["broker"], critic=reached["critic"])
    assert {name for name, recorder in at.items() if recorder.first_bytes} == {*own}
    for name, recorder in at.items():
        assert set(recorder.first_bytes) == {TLS_HANDSHAKE}, name
        assert recorder.seen == set(), name
