"""A fleet on Ray Serve, which starts the servers, routes requests and replaces dead servers."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import InvalidArgument, ServerError
from kvkeep.fleet.affinity import MIDDLEWARES_IMPORT_PATH
from kvkeep.fleet.config import Autoscaling, ReplicaConfig

APPLICATION_NAME = "kvkeep"
_RAY_OBJECT_STORE_BYTES = 128 << 20  # small, as it is not used
# In a cluster that runs already, its operator must set the last one.
_RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 is too short on a busy machine
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": MIDDLEWARES_IMPORT_PATH,
}
_ROUTER_IMPORT_PATH: Any = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def require_ray() -> None:
    """Raise InvalidArgument if the `fleet` extra is not installed."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        message = f"kvkeep fleet needs {error.name}: pip install 'kvkeep[fleet]'"
        raise InvalidArgument(message) from None


@contextmanager
def running_fleet(
    config: ReplicaConfig, autoscaling: Autoscaling, host: str, port: int, address: str | None
) -> Iterator[None]:
    """Run a fleet; on exit let requests finish, so that all sessions are in the store.

    host, port: where it listens for HTTP. address: of a Ray cluster that serves nothing else; None
    to start one on this machine. Raises ServerError.
    """
    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    _connect(autoscaling.max_servers * config.threads, address)
    try:
        if serve.status().proxies:  # they would keep their configuration, and stop with this fleet
            raise ServerError(f"the Ray cluster at {address} is in use: run `serve shutdown`")
        try:
            _serve(_ray_application(config, autoscaling), host, port)
            yield
        finally:
            serve.shutdown()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _connect(total_threads: int, address: str | None) -> None:
    """Connect to a Ray cluster, or start one here. total_threads: of all servers together."""
    import ray

    quiet_options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        ray.init(
            address="local",  # not a cluster that Ray would find by itself
            include_dashboard=False,
            num_cpus=max(os.cpu_count() or 1, total_threads),
            object_store_memory=_RAY_OBJECT_STORE_BYTES,
            **quiet_options,
        )
        return
    _require_listener(address)
    try:
        ray.init(address=address, **quiet_options)
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ServerError(
            f"cannot join the Ray cluster at {address} ({error}): Python, Ray, RAY_AUTH_MODE and "
            "~/.ray/auth_token must be the same on both machines"
        ) from error


def _require_listener(address: str) -> None:
    """Raise ServerError if nothing listens at host:port: Ray would wait for two minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "://" in address:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise ServerError(f"no Ray cluster responds at {address} ({error})") from None


def _serve(application: Any, host: str, port: int) -> None:
    """Start Ray's HTTP proxies and the replicas of a Ray Serve application."""
    import ray
    from ray import serve

    try:
        serve.start(
            http_options={"host": host, "port": port, "location": "EveryNode"},
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
        serve.run(application, name=APPLICATION_NAME, route_prefix="/")
    except (RuntimeError, TimeoutError, ray.exceptions.RayError) as error:
        raise ServerError(
            f"the fleet did not start ({error}); see the servers' logs in "
            "/tmp/ray/session_latest/logs/serve on their machines"
        ) from error


def _ray_application(config: ReplicaConfig, autoscaling: Autoscaling) -> Any:
    """Return the Ray Serve application: replicas of `ReplicaServer` and how to route to them."""
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from kvkeep.fleet.replica import ReplicaServer

    replica_options: dict[str, Any] = {"num_replicas": autoscaling.min_servers}
    if autoscaling.min_servers != autoscaling.max_servers:
        ray_config = AutoscalingConfig(
            min_replicas=autoscaling.min_servers,
            max_replicas=autoscaling.max_servers,
            target_ongoing_requests=autoscaling.target_requests,
        )
        replica_options = {"autoscaling_config": ray_config}
    deployment = serve.deployment(
        name=APPLICATION_NAME,
        **replica_options,
        max_ongoing_requests=4 * autoscaling.target_requests,  # others get further requests
        graceful_shutdown_timeout_s=autoscaling.grace_seconds,
        health_check_period_s=2,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTER_IMPORT_PATH,  # by the header `x-session-id`
            request_router_kwargs={"num_fallback_replicas": autoscaling.max_servers - 1},
        ),
        ray_actor_options={
            "num_cpus": config.threads,
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(config.threads)}},
        },
    )
    return deployment(serve.ingress()(ReplicaServer)).bind(config)
