"""What every test gets, and the stores that the broker's suites run on."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from penstock.memory.collector import collect_rarely
from services.broker.records.store import Store
from tests.helpers.stores.stores import GROUPED_STORES, STORES, RedisServers, opened_store, redis_servers

# What a store must do, its own suite shows on each; all else is shown on the one that runs are kept in.
REPEATED_STORES = ("memory", *GROUPED_STORES)

# How soon examples are drawn says how busy the machine is, not whether the code is right.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")

# Their files share what takes seconds to make: the process from which the others of a trainer are forked.
ONE_PROCESS_FOLDERS = ("tests/contract/trainer/meshes",)

# What takes longest, the longest first: half a minute or more each.
LONG_FILES = (
    "contract/trainer/meshes/test_sharded_trainer.py",
    "e2e/deployments/test_slurm.py",
    "e2e/test_quickstart.py",
    "e2e/faults/test_broker_faults.py",
    "e2e/faults/test_faults.py",
    "e2e/test_lora.py",
    "e2e/test_scorers.py",
    "e2e/environments/test_environments.py",
    "e2e/faults/test_full_disk.py",
    "e2e/plans/test_followed_plan.py",
    "e2e/plans/test_moved_trainer.py",
    "e2e/plans/test_drawn_plans.py",
    "e2e/test_mutual_tls.py",
    "e2e/test_reward_models.py",
    "e2e/test_broadcasts.py",
    "e2e/test_sharded_trainer.py",
    "integration/broker/test_redis_outage.py",
    "contract/broker/clocks/test_clocks.py",
    "contract/trainer/test_kills.py",
    "contract/trainer/test_broker_outage.py",
    "integration/console/test_run_command.py",
    "contract/broker/clocks/test_held_loop.py",
    "unit/console/plan/test_plan.py",
    "integration/benchmarks/test_bench.py",
    "contract/broker/test_reload.py",
    "integration/console/test_full_disk.py",
    "integration/scheduler/test_length_transformer.py",
    "contract/generator/test_broken_links.py",
    "contract/engines/test_engines.py",
    "contract/reward/test_code_attacks.py",
    "contract/broker/trajectories/test_large_groups.py",
)


class FilesAndFolders(LoadFileScheduling):
    """Gives each file to one process of pytest, and a folder of `ONE_PROCESS_FOLDERS` with all of its files."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        folder = file.rpartition("/")[0]
        return folder if folder in ONE_PROCESS_FOLDERS else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesAndFolders | None:
    """None leaves it to xdist, as with any other `--dist` than `loadfile`."""
    return FilesAndFolders(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure() -> None:
    """Tests are objects, too, and so is what they import: collecting those costs a twelfth of the unit tests' time."""
    collect_rarely()


def pytest_collection_finish() -> None:
    """All that there is now stays until the end."""
    gc.freeze()


def by_turns(files: Iterable[Path]) -> list[Path]:
    """The files of all kinds of tests mixed, each kind spread over the whole: some wait while others compute."""
    of_kind: dict[str, list[Path]] = {}
    for file in files:
        of_kind.setdefault(file.relative_to(Path(__file__).parent).parts[0], []).append(file)
    shares = [(place / len(kind), file) for kind in of_kind.values() for place, file in enumerate(kind)]
    return [file for _, file in sorted(shares, key=lambda share: share[0])]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks repetitions; long files first, so that no process of pytest begins one when the others are done."""
    here = Path(__file__).parent
    files = [*(here / name for name in LONG_FILES), *by_turns(dict.fromkeys(item.path for item in items))]
    places = {file: place for place, file in enumerate(dict.fromkeys(files))}
    for item in items:
        of_test = getattr(item, "callspec", None)
        if of_test and of_test.params.get("store") in REPEATED_STORES and item.path.name != "test_store.py":
            item.add_marker(pytest.mark.grid)
    items.sort(key=lambda item: places[item.path])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Why a test that passed the second time failed the first, which a rerun would hide."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first try of {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command run inside a test sets up logging for its process; the next test must not inherit that."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServers]:
    """Real Redis servers of every kind, started on demand."""
    with redis_servers(Path(tmp_path_factory.mktemp("redis"))) as running:
        yield running


@pytest.fixture(params=[pytest.param(kind, marks=[pytest.mark.slow] * (kind in GROUPED_STORES)) for kind in STORES])
async def store(request: pytest.FixtureRequest, servers: RedisServers) -> AsyncIterator[Store]:
    """An empty store; the test runs once for each kind."""
    async with opened_store(request.param, servers) as opened:
        yield opened
