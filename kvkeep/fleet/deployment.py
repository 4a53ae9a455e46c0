"""A fleet on Ray Serve: it starts the servers, sends each request to one, and replaces the dead.

Ray Serve's consistent hashing takes a request's `x-session-id` to the same server while the set of
servers is the same, and `affinity.py` gives that header to requests that have none. That is a
matter of speed alone: whoever gets a request about a session takes the session from the store,
where it has one writer at a time.
"""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import InvalidArgument, ServerError
from kvkeep.fleet.affinity import CALLBACK
from kvkeep.fleet.setup import Scale, Setup

NAME = "kvkeep"
_OBJECTS = 128 << 20  # bytes for what servers would hand to each other, which is nothing
_RAYS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # of 5, a busy machine's proxies never start
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": CALLBACK,  # a cluster's user sets it there
}
ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def require_ray() -> None:
    """Raises InvalidArgument where the extra is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"a fleet needs more ({error.name} is missing): pip install 'kvkeep[fleet]'"
        ) from None


@contextmanager
def running(
    setup: Setup, scale: Scale, host: str, port: int, address: str | None
) -> Iterator[None]:
    """A fleet that answers; at the end answers end, and sessions are in the store.

    address: of a Ray cluster on which nothing else is served; None for one that is started on this
    machine. Raises ServerError.
    """
    for name, value in _RAYS.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _join(scale.most * setup.threads, address)
    try:
        if serve.status().proxies:  # it would stay as it is set up, and end with this fleet
            raise ServerError(f"the Ray cluster at {address} serves already: `serve shutdown`")
        try:
            _serve(_application(setup, scale), host, port)
            yield
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _join(threads: int, address: str | None) -> None:
    """threads: of all servers. Nobody else is to be scheduled on this machine."""
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:  # whatever cluster Ray would find by itself
        cores = max(os.cpu_count() or 1, threads)
        local: dict[str, Any] = {
            "include_dashboard": False,
            "num_cpus": cores,
            "object_store_memory": _OBJECTS,
        }
        ray.init(address="local", **quiet, **local)
        return
    _require_answer(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ServerError(
            f"the Ray cluster at {address} does not let kvkeep in ({error}): Python, Ray, "
            "RAY_AUTH_MODE and ~/.ray/auth_token must be the same there and here"
        ) from error


def _require_answer(address: str) -> None:
    """Ray itself waits for two minutes. Addresses of other kinds ("auto") are Ray's to judge."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ServerError(f"no Ray cluster answers at {address} ({error})") from None


def _serve(application: Any, host: str, port: int) -> None:
    import ray
    from ray import serve

    try:
        serve.start(
            http_options={"host": host, "port": port, "location": "EveryNode"},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        serve.run(application, name=NAME, route_prefix="/")
    except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise ServerError(
            f"the fleet did not start ({error}); why is in the logs of its servers, below "
            "/tmp/ray/session_latest/logs/serve on their machines"
        ) from error


def _application(setup: Setup, scale: Scale) -> Any:
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from kvkeep.fleet.serving import Server

    if scale.least == scale.most:
        number: dict[str, Any] = {"num_replicas": scale.least}
    else:
        number = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=scale.least,
                max_replicas=scale.most,
                target_ongoing_requests=scale.each,
            )
        }
    deployment = serve.deployment(
        name=NAME,
        **number,
        max_ongoing_requests=4 * scale.each,
        graceful_shutdown_timeout_s=scale.grace,
        health_check_period_s=2,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # who has enough to do leaves the rest to any other
            request_router_kwargs={"num_fallback_replicas": scale.most - 1},
        ),
        ray_actor_options={
            "num_cpus": setup.threads,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(setup.threads)}},
        },
    )
    return deployment(serve.ingress()(Server)).bind(setup)
