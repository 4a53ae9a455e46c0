"""`kvkeep fleet`: serve one model from several servers, on Ray Serve."""

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from kvkeep.cli.lazy import OptionsOnlyCommand
from kvkeep.cli.options import FiniteRange, command, compact_at_option, option, option_group
from kvkeep.cli.output import say
from kvkeep.cli.serving_options import ServingOptions, require_server_packages
from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects import is_url

if TYPE_CHECKING:
    from kvkeep.fleet.config import ReplicaConfig


def _parse_replicas(text: str) -> tuple[int, int]:
    """Option type: "N" or "N-M", as minimum and maximum."""
    minimum, _, maximum = text.partition("-")
    if minimum.isdigit() and (maximum or minimum).isdigit():
        replicas = int(minimum), int(maximum or minimum)
        if 1 <= replicas[0] <= replicas[1]:
            return replicas
    raise click.BadParameter(
        f"expected a number, such as 2, or a range, such as 1-4; found {text!r}"
    )


@command(cls=OptionsOnlyCommand, hint="name a model with -m: kvkeep fleet -m {}")
def fleet(
    serving: ServingOptions = option_group(ServingOptions),
    store: str = option(
        metavar="URL",
        envvar="KVKEEP_STORE",
        required=True,
        help="Object store for sessions (s3://bucket/prefix), or file:///folder on one machine.",
    ),
    replicas: tuple[int, int] = option(
        metavar="N|N-M",
        type=_parse_replicas,
        default="2",
        help="Number of servers; N-M: scaled with the number of requests.",
    ),
    threads: int = option(
        metavar="N", type=click.IntRange(1), default=1, help="Compute threads of each server."
    ),
    requests: int = option(
        metavar="N",
        type=click.IntRange(1),
        default=16,
        help="Requests in progress at a server before another server is started.",
    ),
    lease: float = option(
        metavar="SECONDS",
        type=FiniteRange(0.5, 600),
        default=2.0,
        help="Time before another server takes over a killed server's sessions.",
    ),
    address: str | None = option(
        metavar="HOST:PORT",
        help="Address of a running Ray cluster; none: start Ray on this machine.",
    ),
    compact_at: float | None = compact_at_option(),
) -> None:
    """Serve a model from several servers, on Ray Serve.

    Sessions are stored in an object store; if a server is killed, another continues its sessions.
    Requests for one session are routed to one server, and so are chats with a common prefix, and
    requests with the same `x-session-id` header.
    """
    serving.require_api_keys_if_exposed()
    serving.require_secret()
    require_server_packages()
    if not is_url(store):
        raise InvalidArgument(
            f"--store must be a URL, such as s3://bucket/prefix or file:///folder; found {store!r}"
        )
    if store.startswith("memory:"):
        raise InvalidArgument("--store memory:// is for one process, and a fleet has several")
    if serving.memory.device != "cpu":  # Ray hides GPUs from servers that reserve none
        raise InvalidArgument(
            "the servers of a fleet compute on CPUs: leave --device out, or use kvkeep serve "
            f"--device {serving.memory.device}"
        )
    serving.memory.check()
    from kvkeep.fleet import deployment

    deployment.require_ray()
    from kvkeep.fleet.config import Autoscaling
    from kvkeep.server.lifecycle import free_port

    host, port = serving.host, free_port(serving.host, serving.port)
    replica_config = _replica_config(serving, store, threads, lease, compact_at)
    autoscaling = Autoscaling(*replicas, requests, serving.grace)
    if not serving.quiet:
        say(f"starting {autoscaling.min_servers} servers")
    previous_handler = signal.getsignal(signal.SIGTERM)
    with deployment.running_fleet(replica_config, autoscaling, host, port, address):
        signal.signal(signal.SIGTERM, previous_handler)  # Ray's ends the process at once
        if not serving.quiet:
            print(f"kvkeep serves {replica_config.model} on http://{host}:{port}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def _replica_config(
    serving: ServingOptions, store: str, threads: int, lease: float, compact_at: float | None
) -> "ReplicaConfig":
    """Check the options, and return the settings of each server. lease: in seconds."""
    from kvkeep.fleet.config import ReplicaConfig, read_secret
    from kvkeep.fleet.replica import require_conditional_writes
    from kvkeep.server.keys import ApiKeys
    from kvkeep.storage.objects import open_object_store

    secret = read_secret(serving.secret_file)
    keys = ApiKeys.read(serving.api_key_file, secret)
    require_conditional_writes(open_object_store(store))
    model = serving.load()
    return ReplicaConfig(
        model=model.name,
        dtype=serving.memory.dtype,
        weight_format=serving.memory.weights,
        output_format=serving.output_format,
        store_url=store,
        secret=secret,
        session_settings=serving.session_settings(model),
        memory_bytes=serving.max_bytes,
        share_prefixes=serving.uses_prefix_cache(),
        threads=threads,
        lease_seconds=lease,
        api_keys=keys,
        hosts=(serving.host, *serving.allow_host),
        origins=serving.allow_origin,
        alias=serving.alias,
        context_policy=serving.context_policy,
        compact_at=compact_at,
        prompt_rules=serving.prompt_rules,
        alignment=serving.alignment_options(),
        speculation=serving.speculation_options(),
        codec=serving.codec,
    )
