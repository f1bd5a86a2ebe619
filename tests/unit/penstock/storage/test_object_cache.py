"""The cache of what lies in object storage: copied once, whole, checked, bounded."""

import asyncio
import errno
import threading
from collections import Counter
from pathlib import Path

import pytest
import structlog

from penstock.config import ConfigError
from penstock.storage import object_cache
from penstock.storage.addresses import checked_address
from penstock.storage.fetched import beside_loop, fetched, forget_copies
from penstock.storage.manifest import MANIFEST_NAME, manifest_text
from penstock.storage.object_cache import ObjectCache, content_digest
from penstock.storage.storage import Storage, StorageError, digest_of
from tests.helpers.waiting import until

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 40, "sub/tokenizer.json": b"[]"}


@pytest.fixture
def downloads(monkeypatch):
    """How often each file was transferred; `fail` in it makes that file's transfer fail."""
    counts: Counter[str] = Counter()
    original = Storage.download

    def download(storage, name, target, **options):
        if counts[f"fail {name}"]:
            raise StorageError(f"{name}: the network is down")
        counts[name] += 1
        original(storage, name, target, **options)

    monkeypatch.setattr(Storage, "download", download)
    return counts


@pytest.fixture
def stored(tmp_path):
    """A folder in a storage, and its address."""
    folder = tmp_path / "stored" / "model"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder, checked_address(f"file://{folder}")


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_copied_once_and_again_where_it_was_damaged_or_has_changed(tmp_path, stored, downloads):
    folder, address = stored
    copy = ObjectCache(tmp_path / "cache").fetch(address)
    assert copy.name == "model"
    assert content(copy) == FILES
    again = ObjectCache(tmp_path / "cache").fetch(address)
    assert again == copy
    assert downloads == Counter(FILES.keys())

    (copy / "model.safetensors").write_bytes(bytes(len(FILES["model.safetensors"])))
    assert content(ObjectCache(tmp_path / "cache").fetch(address)) == FILES
    assert downloads["model.safetensors"] == 2

    (folder / "config.json").write_bytes(b'{"changed": 1}')
    other = ObjectCache(tmp_path / "cache").fetch(address)
    assert other != copy
    assert content(copy) == FILES
    assert content_digest(other) != content_digest(copy)


def test_one_file_has_the_name_of_its_address(tmp_path, stored):
    folder, _ = stored
    copy = ObjectCache(tmp_path / "cache").fetch(checked_address(f"file://{folder}/config.json"))
    assert copy.name == "config.json"
    assert copy.read_bytes() == b"{}"


def test_an_interrupted_transfer_goes_on_with_the_files_that_are_missing(tmp_path, stored, downloads):
    _, address = stored
    downloads["fail model.safetensors"] = 1
    with pytest.raises(StorageError, match="the network is down"):
        ObjectCache(tmp_path / "cache").fetch(address)
    del downloads["fail model.safetensors"]
    assert content(ObjectCache(tmp_path / "cache").fetch(address)) == FILES
    assert downloads == Counter(FILES.keys())


async def test_a_cancelled_caller_ends_the_transfer_and_the_next_one_continues(stored, tmp_path, monkeypatch):
    _, address = stored
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    forget_copies()
    begun, ended = threading.Event(), threading.Event()
    original = Storage.download

    def slow(storage, name, target, *, on_bytes):
        begun.set()
        try:
            while True:
                on_bytes(1)
        finally:
            ended.set()

    monkeypatch.setattr(Storage, "download", slow)
    fetching = asyncio.create_task(beside_loop(fetched, "model.path", address))
    await until(begun.is_set)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    await until(ended.is_set)
    monkeypatch.setattr(Storage, "download", original)
    forget_copies()
    assert content(await beside_loop(fetched, "model.path", address)) == FILES


def test_several_at_once_make_one_copy(tmp_path, stored, downloads):
    """Each has locks of its own, as a process has."""
    _, address = stored
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ObjectCache(tmp_path / "cache").fetch(address))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert downloads == Counter(FILES.keys())


def test_unused_copies_make_room_and_used_ones_stay(tmp_path, stored):
    folder, _ = stored
    addresses = [checked_address(f"file://{folder.parent}/{name}") for name in ("a", "b", "c")]
    for address in addresses:
        Path(address.removeprefix("file://")).write_bytes(bytes(1000))
    first = ObjectCache(tmp_path / "cache", max_bytes=2500)
    first.fetch(addresses[0])
    first.close()
    used = ObjectCache(tmp_path / "cache", max_bytes=2500)
    kept = used.fetch(addresses[1])
    third = ObjectCache(tmp_path / "cache", max_bytes=2500).fetch(addresses[2])
    assert kept.exists()
    assert third.exists()
    assert len([*(tmp_path / "cache").glob("*/content/*")]) == 2
    with pytest.raises(ConfigError, match=r"do not fit in .*PENSTOCK_CACHE_BYTES"):
        used.fetch(checked_address(f"file://{folder}"))


def test_content_that_its_manifest_does_not_describe_is_refused(tmp_path, stored):
    folder, address = stored
    text = manifest_text({name: digest_of(folder / name) for name in FILES})
    (folder / MANIFEST_NAME).write_text(text)
    assert set(content(ObjectCache(tmp_path / "cache").fetch(address))) == {*FILES, MANIFEST_NAME}
    (folder / "model.safetensors").write_bytes(bytes(len(FILES["model.safetensors"])))
    with pytest.raises(ConfigError, match=r"model.safetensors: is not the file that MANIFEST.json describes"):
        ObjectCache(tmp_path / "cache").fetch(address)


def test_links_and_nothing_are_refused(tmp_path, stored):
    folder, address = stored
    with pytest.raises(ConfigError, match="there is no such object"):
        ObjectCache(tmp_path / "cache").fetch(checked_address(f"file://{tmp_path}/nowhere"))
    (folder / "link").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="link is a link"):
        ObjectCache(tmp_path / "cache").fetch(address)


def test_what_a_machine_lacks_is_said_with_the_fix(tmp_path, stored, monkeypatch):
    _, address = stored

    def is_full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "download", is_full)
        with pytest.raises(ConfigError, match=r"model: the disk of .*cache is full; free some space"):
            ObjectCache(tmp_path / "cache").fetch(address)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the cache cannot be made: Not a directory; set XDG_CACHE_HOME"):
        ObjectCache(tmp_path / "file" / "cache").fetch(address)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "gcsfs" else object())
    with pytest.raises(ConfigError, match=r"gs://b1/a: needs the package gcsfs, .*pip install 'penstock\[gs\]'"):
        ObjectCache(tmp_path / "cache").fetch(checked_address("gs://b1/a"))


def test_a_transfer_that_lasts_says_how_far_it_is(tmp_path, stored, monkeypatch):
    _, address = stored
    monkeypatch.setattr(object_cache, "_FIRST_REPORT_S", 0.0)
    with structlog.testing.capture_logs() as lines:
        ObjectCache(tmp_path / "cache").fetch(address)
    told = [line for line in lines if line["event"] == "fetching"]
    assert len(told) == 1
    assert told[0]["address"] == address


def test_a_process_finds_the_same_copy_until_it_forgets(tmp_path, stored, monkeypatch, downloads):
    folder, address = stored
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    forget_copies()
    assert fetched("model.path", folder) == folder
    (folder / "resume").mkdir()
    (folder / "resume" / "shard.safetensors").write_bytes(b"moments")
    light = fetched("model.path", address, "tokenizer")
    assert content(light).keys() == {"config.json", "sub/tokenizer.json"}
    assert content(fetched("model.path", address, "model")) == FILES
    whole = fetched("model.path", address)
    (folder / "config.json").write_bytes(b'{"changed": 1}')
    assert fetched("model.path", address) == whole
    forget_copies()
    assert fetched("model.path", address) != whole
    with pytest.raises(ConfigError, match=r"^model.path: file:///nowhere/at/all: there is no such"):
        fetched("model.path", checked_address("file:///nowhere/at/all"))
