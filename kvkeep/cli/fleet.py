"""`kvkeep fleet`: serve one model from several servers, on Ray Serve."""

import signal
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from kvkeep.cli import serve
from kvkeep.cli.lazy import OptionsOnly
from kvkeep.cli.memory import MemoryChoice, uses_prefixes
from kvkeep.cli.output import say
from kvkeep.errors import InvalidArgument
from kvkeep.storage.objects import is_url

if TYPE_CHECKING:
    from kvkeep.fleet.setup import Setup


def _replicas(text: str) -> tuple[int, int]:
    """Option type: "N" or "N-M", as minimum and maximum."""
    minimum, _, maximum = text.partition("-")
    if minimum.isdigit() and (maximum or minimum).isdigit():
        replicas = int(minimum), int(maximum or minimum)
        if 1 <= replicas[0] <= replicas[1]:
            return replicas
    raise click.BadParameter(
        f"expected a number, as 2, or the least and the most, as 1-4; found {text!r}"
    )


@click.command(cls=OptionsOnly, hint="name a model with -m: kvkeep fleet -m {}")
@serve.serving_options
@click.option(
    "--store",
    metavar="URL",
    envvar="KVKEEP_STORE",
    required=True,
    help="Where sessions are kept, as s3://bucket/prefix; file:///folder on one machine.",
)
@click.option(
    "--replicas",
    metavar="N|N-M",
    type=_replicas,
    default="2",
    help="How many servers; of N-M as many as there are requests for.",
)
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    help="That each server computes with.",
)
@click.option(
    "--requests",
    metavar="N",
    type=click.IntRange(1),
    default=16,
    help="At work at a server, before another is started.",
)
@click.option(
    "--lease",
    metavar="SECONDS",
    type=click.FloatRange(0.5, 600),
    default=2.0,
    help="For which nobody else goes on with a session whose server was killed.",
)
@click.option(
    "--address", metavar="HOST:PORT", help="Of a Ray cluster that runs; none: this machine."
)
def fleet(memory: MemoryChoice, **options: Any) -> None:
    """Serve a model from several servers, on Ray Serve.

    Sessions are kept in an object store, and go on at another server when theirs is killed. What
    is about one session goes to one server, and so do chats that begin alike; or, where it is sent,
    all requests with the same header `x-session-id`.
    """
    serve.require_safe(options["host"], options["api_key_file"])
    serve.require_secret(options)
    serve.require_installed()
    if not is_url(options["store"]):
        raise InvalidArgument(
            f"--store is a URL, as s3://bucket/prefix or file:///folder; found {options['store']!r}"
        )
    if options["store"].startswith("memory:"):
        raise InvalidArgument("--store memory:// is of one process, and a fleet has several")
    memory.check()
    from kvkeep.fleet import deployment

    deployment.require_ray()
    from kvkeep.fleet.setup import Scale
    from kvkeep.server.lifecycle import free_port

    host, port = options["host"], free_port(options["host"], options["port"])
    setup = _setup(memory, options)
    min_servers, max_servers = options["replicas"]
    scale = Scale(min_servers, max_servers, options["requests"], options["grace"])
    if not options["quiet"]:
        say(f"starting {scale.min_servers} servers")
    previous_handler = signal.getsignal(signal.SIGTERM)
    with deployment.running_fleet(setup, scale, host, port, options["address"]):
        signal.signal(signal.SIGTERM, previous_handler)  # Ray's ends the process at once
        if not options["quiet"]:
            print(f"kvkeep serves {setup.model} on http://{host}:{port}", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def _setup(memory: MemoryChoice, options: dict[str, Any]) -> "Setup":
    """Return the settings of each server, checked before any is started."""
    from kvkeep.fleet.replica import require_conditional_writes
    from kvkeep.fleet.setup import Setup, read_secret
    from kvkeep.server.keys import ApiKeys
    from kvkeep.storage.objects import open_object_store

    secret = read_secret(options["secret_file"])
    keys = ApiKeys.read(options["api_key_file"], secret)
    require_conditional_writes(open_object_store(options["store"]))
    model = memory.load(progress=not options["quiet"])
    return Setup(
        model=model.name,
        dtype=memory.dtype,
        weights=memory.weights,
        store=options["store"],
        secret=secret,
        settings=serve.session_settings(memory, model, options["max_bytes"]),
        memory=options["max_bytes"],
        prefixes=uses_prefixes(memory, options["prefix_cache"]),
        threads=options["threads"],
        lease=options["lease"],
        keys=keys,
        hosts=(options["host"], *options["allow_host"]),
        origins=options["allow_origin"],
        alias=options["alias"],
    )
