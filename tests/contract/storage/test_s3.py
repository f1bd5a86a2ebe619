"""What lies on a server that speaks S3: read, written and listed over HTTP, and what is said where that fails."""

from __future__ import annotations

import pytest

from penstock.config import ConfigError
from penstock.storage.addresses import Address, below
from penstock.storage.object_cache import ObjectCache
from penstock.storage.storage import Storage, StorageError, digest_of, filesystem
from tests.helpers.stores.object_storage import put_folder, s3_server

LARGE_BYTES = 60_000_000
"""More than one part of an upload."""


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as address:
        yield address


def test_files_are_those_that_were_uploaded_by_digest(bucket: Address, tmp_path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "sub" / "empty").write_bytes(b"")
    (folder / "weights").write_bytes(b"penstock" * (LARGE_BYTES // 8))
    put_folder(folder, below(bucket, "models/a"))
    put_folder(folder / "sub", below(bucket, "models/a-other"))
    storage = Storage(below(bucket, "models/a"))
    assert {name: file.size_bytes for name, file in storage.list().items()} == {
        "config.json": 2,
        "sub/empty": 0,
        "weights": LARGE_BYTES,
    }
    assert Storage(below(bucket, "models")).names() == {"a", "a-other"}
    copy = ObjectCache(tmp_path / "cache").fetch(storage.address)
    assert digest_of(copy / "weights") == digest_of(folder / "weights")
    assert ObjectCache(tmp_path / "cache").fetch(below(bucket, "models/a/config.json")).read_bytes() == b"{}"
    # The version of what is there is the server's: the same length with another content is another copy.
    storage.write("config.json", b"[]")
    assert (ObjectCache(tmp_path / "cache").fetch(storage.address) / "config.json").read_bytes() == b"[]"
    assert (copy / "config.json").read_bytes() == b"{}"
    storage.delete("sub")
    storage.delete("sub")
    assert storage.list().keys() == {"config.json", "weights"}
    assert storage.read("sub/empty") is None


def test_what_cannot_be_read_is_said_in_one_line_with_the_fix(bucket: Address, monkeypatch, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"s3://.*/none: there is no such object or folder"):
        Storage(below(bucket, "none")).list()
    with pytest.raises(ConfigError, match="there is no such object or bucket"):
        Storage(Address("s3://no-such-bucket/a")).list()
    filesystem.cache_clear()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"access is refused .*AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        Storage(below(bucket, "models")).list()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    filesystem.cache_clear()
    with pytest.raises(StorageError, match=r"^s3://.*/models: "):
        Storage(below(bucket, "models")).list()
