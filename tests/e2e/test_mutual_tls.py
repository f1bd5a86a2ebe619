"""The quick start's model is trained with everything under mutual TLS, and no credential passes in the clear."""

from __future__ import annotations

import socket
import subprocess
import time
from contextlib import ExitStack, contextmanager, suppress

import pytest
import yaml

from console.launch.ports import free_addresses
from tests.e2e.runs import RUN_ID, assert_balanced, running, small_run
from tests.helpers.certificates import issue, make_authority
from tests.helpers.console import COMMAND, environment
from tests.helpers.tls_proxy import TLS_HANDSHAKE, recording

TOKEN = "open-sesame-and-nothing-else"
SECRETS = (TOKEN.encode(), b"authorization", b"bearer")
NUM_STEPS = 2
ROLES = ("broker", "scheduler", "reward", "trainer", "generator")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


def credentials(security):
    """The environment of who has these files."""
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
        roles = {"scheduler": "broker"}.get(role, role)
        run = "*" if roles in ("operator", "broker") else RUN_ID
        return issue(authority, roles=[roles], run=run, name=name)

    return make


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


def wait_for_listeners(addresses):
    """Until something listens at each."""
    deadline = time.monotonic() + 120
    for address in addresses:
        host, _, port = address.rpartition(":")
        while True:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                break
            assert time.monotonic() < deadline, f"nothing listens at {address}"
            time.sleep(0.1)


@contextmanager
def service(kind, settings, folder, env):
    """`penstock serve` of that kind."""
    path = folder / f"{kind}.yaml"
    path.write_text(yaml.safe_dump(settings))
    with (folder / f"{kind}.log").open("wb") as log:
        command = (*COMMAND, "serve", kind, "--config", str(path))
        process = subprocess.Popen(command, cwd=folder, env={**environment(), **env}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def test_services_train_by_certificates_of_their_roles_and_no_credential_passes_in_the_clear(
    task, tmp_path, certificate, monkeypatch
):
    own = dict(zip((*ROLES, "weights"), free_addresses(len(ROLES) + 1), strict=True))
    document = quick_run(task, tmp_path)
    with ExitStack() as stack:
        at = stack.enter_context(recording(own, SECRETS))
        told = {name: recorder.address for name, recorder in at.items()}
        settings = {
            "broker": {"redis_url": "memory://", "scheduler": told["scheduler"]},
            "scheduler": {},
            "reward": {
                "run_id": RUN_ID,
                "worker_id": "reward-0",
                "broker": told["broker"],
                "tokenizer_path": str(task.model_dir),
                "reward": {"model": "exact_match"},
            },
            "trainer": {
                "weights_listen": own["weights"],
                "weights_url": told["weights"],
                "state_dir": None,
                "allowed_roots": [str(tmp_path), str(task.model_dir.parent)],
            },
            "generator": {
                "generator_id": "gen-0",
                "site": "here",
                "run_id": RUN_ID,
                "broker": told["broker"],
                "weights": told["trainer"],
                "model_path": str(task.model_dir),
                "dtype": "float32",
                "cache_dir": str(tmp_path / "cache"),
                "engine": {"engine": "transformers", "max_concurrent_samples": 32, "num_threads": 1},
            },
        }
        names = {"reward": "reward", "generator": "gen"}
        for kind in ROLES:
            env = credentials(certificate(kind, names.get(kind, kind)))
            stack.enter_context(service(kind, {"listen": own[kind], **settings[kind]}, tmp_path, env))
        for name, value in credentials(certificate("operator", "anna")).items():
            monkeypatch.setenv(name, value)
        wait_for_listeners(own.values())
        document["endpoints"] = {name: told[name] for name in ("broker", "scheduler", "reward", "trainer")}
        document["endpoints"]["generators"] = [told["generator"]]
        with running(document, tmp_path) as run:
            status = run.end()
            logs = {kind: (tmp_path / f"{kind}.log").read_text()[-3000:] for kind in ROLES}
            assert status == 0, f"{run.text}\n{logs}"
            assert_balanced(run.summary(), num_samples=NUM_STEPS * 4 * 4)
    assert {name for name, recorder in at.items() if recorder.first_bytes} == {*own}
    for name, recorder in at.items():
        assert set(recorder.first_bytes) == {TLS_HANDSHAKE}, name
        assert recorder.seen == set(), name
