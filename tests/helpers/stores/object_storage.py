"""Object storage for tests: a folder, and a server that speaks S3 over HTTP (moto)."""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.storage.addresses import Address, checked_address
from penstock.storage.storage import Storage, filesystem


@contextmanager
def s3_server() -> Iterator[Address]:
    """The address of a bucket on a server of its own, for which the environment has the credentials."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            patch.setenv("AWS_ACCESS_KEY_ID", "key")
            patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
            patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
            # Nothing asks the machine for a role.
            patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
            # All servers of one process have the same buckets.
            bucket = f"bucket-{secrets.token_hex(4)}"
            boto3.client("s3").create_bucket(Bucket=bucket)
            filesystem.cache_clear()
            yield checked_address(f"s3://{bucket}")
    finally:
        filesystem.cache_clear()
        server.stop()


def serve(host: str, port: int, address: Address, folder: Path) -> None:
    """A bucket with the folder's files, on a server that serves until its process is killed."""
    # The server's own name is not a bucket's; read when moto is imported.
    os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=port + 1, verbose=False)
    server.start()
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port + 1}")
    client.create_bucket(Bucket=address.removeprefix("s3://"))
    for path in folder.rglob("*"):
        if path.is_file():
            client.upload_file(str(path), address.removeprefix("s3://"), path.relative_to(folder).as_posix())
    # Others reach it once everything is there; servers of one process have the same buckets.
    ThreadedMotoServer(ip_address=host, port=port, verbose=False).start()
    threading.Event().wait()


def put_folder(folder: Path, address: Address) -> None:
    """Copy a folder to an address."""
    storage = Storage(address)
    for path in folder.rglob("*"):
        if path.is_file():
            storage.upload(path, path.relative_to(folder).as_posix())


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), checked_address(sys.argv[3]), Path(sys.argv[4]))
