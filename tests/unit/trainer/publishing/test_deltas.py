"""Who is offered deltas, and which."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.v1 import weights_pb2
from services.trainer.publishing.deltas import Published, PublishedDeltas


def full(version: int, *, size_bytes: int = 1000) -> weights_pb2.WeightsManifest:
    return weights_pb2.WeightsManifest(policy_version=version, digest=f"d{version}", size_bytes=size_bytes)


def shelf_of(folder: Path, versions: list[int], *, size_bytes: int = 100, max_kept: int = 8) -> PublishedDeltas:
    """A shelf with the delta to each of `versions` from the version before it."""
    folder.mkdir(exist_ok=True)
    shelf = PublishedDeltas(max_kept=max_kept)
    for version in versions:
        path = folder / f"v{version}.delta"
        path.touch()
        manifest = weights_pb2.WeightsManifest(
            policy_version=version,
            digest=f"d{version}",
            base_version=version - 1,
            base_digest=f"d{version - 1}",
            size_bytes=size_bytes,
        )
        shelf.add(Published(manifest=manifest, path=path), full_bytes=1000)
    return shelf


def versions_of(chain: list[weights_pb2.WeightsManifest]) -> list[int]:
    return [manifest.policy_version for manifest in chain]


@pytest.mark.parametrize(("held", "expected"), [(4, [5]), (2, [3, 4, 5]), (1, []), (5, []), (6, [])])
def test_a_chain_leads_from_what_is_held_to_what_is_wanted(tmp_path: Path, held: int, expected: list[int]) -> None:
    shelf = shelf_of(tmp_path, [3, 4, 5])
    chain = shelf.chain(full(5), held_version=held, held_digest=f"d{held}")
    assert versions_of(chain) == expected


def test_a_version_of_another_history_gets_no_delta(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, [3, 4, 5])
    assert shelf.chain(full(5), held_version=4, held_digest="other") == []
    other = full(5)
    other.digest = "other"
    assert shelf.chain(other, held_version=4, held_digest="d4") == []


def test_a_chain_that_takes_as_many_bytes_as_the_whole_is_not_offered(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, [3, 4, 5], size_bytes=334)
    assert versions_of(shelf.chain(full(5), held_version=3, held_digest="d3")) == [4, 5]
    assert shelf.chain(full(5), held_version=2, held_digest="d2") == []


def test_the_oldest_deltas_and_their_files_go_first(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, [1, 2, 3], max_kept=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v2.delta", "v3.delta"]
    assert [delta.path for delta in shelf] == [tmp_path / "v2.delta", tmp_path / "v3.delta"]
    assert shelf.chain(full(3), held_version=0, held_digest="d0") == []


def test_deltas_that_together_are_no_saving_go_first_but_for_the_newest(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, [1, 2, 3, 4, 5, 6], size_bytes=240)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v3.delta", "v4.delta", "v5.delta", "v6.delta"]
    assert versions_of(shelf.chain(full(6), held_version=2, held_digest="d2")) == [3, 4, 5, 6]
    shelf_of(tmp_path / "large", [1, 2, 3, 4, 5], size_bytes=800)
    assert sorted(path.name for path in (tmp_path / "large").iterdir()) == ["v3.delta", "v4.delta", "v5.delta"]
