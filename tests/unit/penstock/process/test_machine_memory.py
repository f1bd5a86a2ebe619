"""What a machine, or a container on it, still has in memory, from recorded files of the kernel."""

from __future__ import annotations

import os

import pytest

from penstock.memory.machine_memory import available_bytes, total_bytes


@pytest.fixture
def kernel(tmp_path):
    """Writes the kernel's files; returns what is found available."""

    def have(files: dict[str, str]) -> int:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        return available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cgroup")

    return have


MACHINE = {"proc/meminfo": "MemTotal:       8000 kB\nMemAvailable:    4000 kB\nSwapFree: 9 kB\n"}


def test_without_groups_it_is_what_the_machine_has(kernel):
    assert kernel(MACHINE) == 4000 * 1024


def test_a_container_has_what_its_limit_leaves_with_its_caches(kernel):
    group = {
        "proc/self/cgroup": "0::/pod/own\n",
        "cgroup/pod/own/memory.max": "3000000\n",
        "cgroup/pod/own/memory.current": "2500000\n",
        "cgroup/pod/own/memory.stat": "anon 900000\ninactive_file 400000\nactive_file 50000\n",
    }
    assert kernel(MACHINE | group) == 3_000_000 - 2_500_000 + 450_000


def test_the_tightest_group_above_decides(kernel):
    groups = {
        "proc/self/cgroup": "0::/pod/own\n",
        "cgroup/pod/own/memory.max": "max\n",
        "cgroup/pod/own/memory.current": "2500000\n",
        "cgroup/pod/memory.max": "2600000\n",
        "cgroup/pod/memory.current": "2590000\n",
    }
    assert kernel(MACHINE | groups) == 10_000


def test_groups_of_the_first_kind_count(kernel):
    group = {
        "proc/self/cgroup": "5:devices:/\n4:cpu,memory:/own\n0::/\n",
        "cgroup/memory/own/memory.limit_in_bytes": "3000000\n",
        "cgroup/memory/own/memory.usage_in_bytes": "3500000\n",
    }
    assert kernel(MACHINE | group) == 0


def test_elsewhere_it_is_all_of_the_machine(kernel):
    assert kernel({}) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_all_that_there_is_is_the_machine_or_the_tightest_limit(kernel, tmp_path):
    roots = {"proc": tmp_path / "proc", "cgroups": tmp_path / "cgroup"}
    kernel(MACHINE)
    assert total_bytes(**roots) == 8000 * 1024
    kernel({"proc/self/cgroup": "0::/pod\n", "cgroup/pod/memory.max": "3000000\n"})
    assert total_bytes(**roots) == 3_000_000
