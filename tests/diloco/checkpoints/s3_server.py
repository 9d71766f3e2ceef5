"""A server of S3's protocol on loopback, in a process of its own.

The tests' own process uses boto3, because s3fs starts a thread that stays, and islands are forked
from it.
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO
from unittest import mock

import pytest

START_SECONDS = 60.0
BUCKET = "mirror"


@contextmanager
def s3_server() -> Iterator[str]:
    """Start the server with an empty BUCKET; while it runs, s3:// leads there. Yields the URL of
    the bucket.
    """
    with s3_process():
        yield f"s3://{BUCKET}"


@contextmanager
def s3_process() -> "Iterator[subprocess.Popen[bytes]]":
    """As `s3_server`, and yields its process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # moto reads this process's environment, too: no key of a real account may be in it.
    account = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    account |= {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_EC2_METADATA_DISABLED": "true"}
    with ExitStack() as stack, mock.patch.dict(os.environ, account):
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        # A file, because it writes a line for each request, and a pipe that nobody reads would stop
        # it.
        printed = stack.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=printed)
        try:
            wait_for(port, process, printed)
            pytest.importorskip("boto3").client("s3").create_bucket(Bucket=BUCKET)
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for(port: int, process: "subprocess.Popen[bytes]", printed: IO[bytes]) -> None:
    """Wait until the server takes connections. Fails with what it has printed if it ends before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            printed.seek(0)
            raise AssertionError(f"the server has ended: {printed.read().decode()}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError(f"the server did not listen within {START_SECONDS:g} s")
