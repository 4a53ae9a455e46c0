"""A fleet on Ray Serve: it starts the servers, sends each request to one, and replaces the dead.

Ray Serve's consistent hashing takes a request's `x-session-id` to the same server while the set of
servers is the same, and `affinity.py` gives that header to requests that have none. That is a
matter of speed alone: whoever gets a request about a session takes the session from the store,
where it has one writer at a time.
"""

import logging
import os
import socket
from typing import Any

from kvkeep.errors import InvalidArgument, ServerError
from kvkeep.fleet.affinity import CALLBACK
from kvkeep.fleet.setup import Scale, Setup

NAME = "kvkeep"
_OBJECTS = 128 << 20  # bytes for what servers would hand to each other, which is nothing
_PROXIES = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"  # on a cluster's machines its user sets it
ROUTER: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def require_ray() -> None:
    """Raises InvalidArgument where the extra is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(
            f"a fleet needs more ({error.name} is missing): pip install 'kvkeep[fleet]'"
        ) from None


def start(setup: Setup, scale: Scale, host: str, port: int, address: str | None) -> None:
    """Starts a fleet, and returns once it answers. address: of a Ray cluster; None for one that is
    started on this machine, for as long as this process lives."""
    if address is not None:
        _require_answer(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault(_PROXIES, CALLBACK)
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    local: dict[str, Any] = {}
    if address is None:  # here nobody else is to be scheduled, and more threads than cores are slow
        cores = max(os.cpu_count() or 1, scale.most * setup.threads)
        local = {"include_dashboard": False, "num_cpus": cores, "object_store_memory": _OBJECTS}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise ServerError(
            f"no Ray cluster at {address} let kvkeep in ({error}): is it one, are RAY_AUTH_MODE "
            "and ~/.ray/auth_token the same there and here?"
        ) from error
    serve.start(
        http_options={"host": host, "port": port, "location": "EveryNode"},
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    try:
        serve.run(_application(setup, scale), name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise ServerError(
            f"the fleet did not start ({error}); why is in the logs of its servers, below "
            "/tmp/ray/session_latest/logs/serve on their machines"
        ) from error


def _require_answer(address: str) -> None:
    """Ray itself waits for two minutes. Addresses of other kinds ("auto") are Ray's to judge."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ServerError(f"no Ray cluster answers at {address} ({error})") from None


def stop() -> None:
    """Ends the fleet: answers end, sessions are in the store."""
    import ray
    from ray import serve

    if not ray.is_initialized():  # a shutdown of nothing would start a cluster to shut down
        return
    serve.shutdown()  # type: ignore[no-untyped-call]
    ray.shutdown()


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
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        ray_actor_options={
            "num_cpus": setup.threads,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(setup.threads)}},
        },
    )
    return deployment(serve.ingress()(Server)).bind(setup)
