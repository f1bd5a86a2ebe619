"""Processes that torchrun starts: what their variables say, and on which networks they may talk."""

import os
from pathlib import Path

import pytest

from penstock.config import ConfigError
from penstock.process.grace_periods import CHECKPOINT_S
from penstock.security import NO_SECURITY, Security
from services.trainer import server
from services.trainer.config import TrainerConfig
from services.trainer.distributed.launch import Place, check_size, check_trust

PROTECTED = [
    Security(token="t"),
    Security(cert_file=Path("c"), key_file=Path("k")),
    Security(ca_file=Path("a")),
]


def variables(*, rank=0, num_ranks=4, num_local=2):
    values = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank % num_local, "LOCAL_WORLD_SIZE": num_local}
    return {"TORCHELASTIC_RUN_ID": "r"} | {name: str(value) for name, value in values.items()}


def test_a_place_is_read_where_torchrun_started_several_processes():
    place = Place.read(variables(rank=3))
    assert place is not None
    assert (place.rank, place.num_ranks, place.local_rank, place.spans_machines) == (3, 4, 1, True)
    assert not Place.read(variables(num_local=4)).spans_machines
    assert Place.read(variables(num_ranks=1, num_local=1)) is None
    assert Place.read({}) is None


@pytest.mark.parametrize("security", PROTECTED)
def test_protected_trainers_talk_over_a_network_only_where_it_is_trusted(security):
    place = Place.read(variables())
    with pytest.raises(ConfigError, match="trusts_network: true"):
        check_trust(place, security, trusts_network=False)
    check_trust(place, security, trusts_network=True)
    for unprotected in (NO_SECURITY, Security(allows_plain=True)):
        check_trust(place, unprotected, trusts_network=False)
    check_trust(Place.read(variables(num_local=4)), security, trusts_network=False)
    check_trust(None, security, trusts_network=False)


@pytest.mark.parametrize("rank", [0, 3])
async def test_every_process_refuses_before_it_listens(monkeypatch, rank):
    for name, value in variables(rank=rank).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PENSTOCK_TOKEN", "t")
    monkeypatch.setenv("PENSTOCK_INSECURE", "true")
    with pytest.raises(ConfigError, match="trusts_network"):
        await server.serve(TrainerConfig())


def test_a_run_for_another_number_of_processes_is_refused():
    with pytest.raises(ConfigError, match="set it to 4"):
        check_size(Place.read(variables()), 2)


@pytest.mark.parametrize("rank", [0, 3])
async def test_no_process_outlives_the_torchrun_that_started_it(monkeypatch, rank):
    for name, value in variables(rank=rank).items():
        monkeypatch.setenv(name, value)

    class WatchesError(Exception):
        pass

    def watch(parent_pid, *, grace_s):
        raise WatchesError(parent_pid, grace_s)

    monkeypatch.setattr(server, "end_group_with_parent", watch)
    with pytest.raises(WatchesError) as watched:
        await server.serve(TrainerConfig())
    assert watched.value.args == (os.getppid(), CHECKPOINT_S)
