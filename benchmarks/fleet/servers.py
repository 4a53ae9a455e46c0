"""Servers to measure, in their own processes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx


@contextmanager
def running_kvkeep(*arguments: str, threads: int) -> Iterator[str]:
    """Run `kvkeep` with these arguments; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvkeep", *arguments, "--port", str(_free_port())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise RuntimeError(f"kvkeep {' '.join(arguments)} did not start: {line}")
        yield line.split()[-1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


@contextmanager
def one_engine(threads: int, *more: str) -> Iterator[str]:
    with running_kvkeep("serve", "--no-speculate", *more, threads=threads) as url:
        yield url


@contextmanager
def fleet(replicas: int, store: str, *more: str, threads: int = 1) -> Iterator[str]:
    counts = ("--replicas", str(replicas), "--threads", str(threads))
    with running_kvkeep(
        "fleet", "--no-speculate", "--store", store, *counts, *more, threads=1
    ) as url:
        yield url


@contextmanager
def object_store() -> Iterator[str]:
    """Run an S3 server (moto) and set its credentials in the environment; yields a bucket's URL."""
    port = _free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_REGION": "us-east-1",
    }
    try:
        signed = (
            "AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request, "
            "SignedHeaders=host, Signature=0"
        )
        transport = httpx.HTTPTransport(retries=20)
        with httpx.Client(transport=transport, timeout=10) as client:
            response = client.put(f"{endpoint}/kvkeep", headers={"Authorization": signed})
            response.raise_for_status()
        yield "s3://kvkeep/measured"
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
