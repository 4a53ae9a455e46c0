"""`kvkeep models` and `kvkeep pull`: list, name, show, fetch, export and remove models."""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.cli.lazy import MODELS_EQUIVALENTS, LazyCommand, LazyGroup
from kvkeep.cli.model_options import DTYPE_OPTION, WEIGHTS_OPTION, complete_models, load_by_name
from kvkeep.cli.options import JSON_OPTION, command, declare_options, option
from kvkeep.cli.output import echo_facts, echo_json, echo_table, format_mb, say
from kvkeep.errors import ModelNotFound
from kvkeep.models.hub.library import (
    LocalModel,
    derived_folders,
    home,
    pulled_models,
    remove_model,
)
from kvkeep.models.hub.names import add_name, name_path, named_models
from kvkeep.models.hub.source import DEFAULT_MODEL, KNOWN_MODELS, local_folder

if TYPE_CHECKING:
    from kvkeep.model_facts import GroupFacts, ModelFacts

SUBCOMMANDS = {
    "list": LazyCommand("models:list_", "List local models, with size and last use."),
    "add": LazyCommand("models:add", "Add a short name for a GGUF file or a model folder."),
    "show": LazyCommand("models:show", "Show a model's architecture, kernels and memory use."),
    "export": LazyCommand("models:export", "Write a model for other programs."),
    "rm": LazyCommand("models:rm", "Remove models, or names that were added."),
}
_QUIET_OPTION = option("-q", is_flag=True, help="No progress bars.")


@click.group(
    cls=LazyGroup,
    lazy_commands=SUBCOMMANDS,
    equivalents=MODELS_EQUIVALENTS,
    invoke_without_command=True,
)
@click.pass_context
@declare_options
def models(context: click.Context, as_json: bool = JSON_OPTION) -> None:
    """List local models; add, show, export or remove one."""
    if context.invoked_subcommand is None:
        _echo_models(as_json)
    elif as_json:
        raise click.UsageError(
            f"--json belongs after the command: kvkeep models {context.invoked_subcommand} --json"
        )


@command("list")
def list_(as_json: bool = JSON_OPTION) -> None:
    """List local models, with size and last use."""
    _echo_models(as_json, with_last_use=True)


@command()
@click.argument("name")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def add(name: str, path: Path) -> None:
    """Add a short NAME for a GGUF file or a model folder.

    Nothing is copied: the file stays where it is. `kvkeep models rm NAME` removes only the name.
    """
    add_name(name, path)
    click.echo(f"{name} is {path.absolute()}")


def _echo_models(as_json: bool, with_last_use: bool = False) -> None:
    """Print the models on this machine, and the known ones that can be pulled."""
    models = [*pulled_models(), *named_models().values()]
    rows: list[tuple[str, int | None, str, str | None, float | None]] = [
        (model.name, model.nbytes, model.source, str(model.path), model.last_used)
        for model in models
    ]
    names = {model.name for model in models}
    for name, known_model in KNOWN_MODELS.items():
        if name not in names:
            rows.append((name, None, known_model.requirement, None, None))
    if as_json:
        keys = ("name", "bytes", "source", "folder", "used")
        echo_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    table = [("NAME", "SIZE", "SOURCE", "FOLDER", "USED")]
    for name, size, source, folder, used in rows:
        shown_size = "(gone)" if size == 0 else "-" if size is None else format_mb(size)
        shown_use = "-" if used is None else time.strftime("%Y-%m-%d", time.localtime(used))
        table.append((name, shown_size, source, folder or "(not pulled)", shown_use))
    echo_table(table if with_last_use else [row[:-1] for row in table], right_aligned=[1])


@command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=complete_models)
def show(
    name: str,
    dtype: str = DTYPE_OPTION,
    weights: str | None = WEIGHTS_OPTION,
    as_json: bool = JSON_OPTION,
) -> None:
    """Show model NAME: its architecture, its kernels on this machine, and its memory use.

    The weights are not read. The model must be on this machine; `kvkeep pull` fetches it.
    """
    from kvkeep.model_facts import model_facts

    facts = model_facts(name, dtype, weights)
    if as_json:
        echo_json(asdict(facts))
    else:
        echo_facts(_describe_facts(facts))


def _describe_facts(facts: "ModelFacts") -> Iterator[tuple[str, str]]:
    """Yield the label and text of each line of `kvkeep models show`."""
    yield "family", facts.architecture
    heads = f"{facts.heads} query heads, {facts.kv_heads} KV heads, head_dim {facts.head_dim}"
    yield "layers", f"{facts.layers}, {heads}; width {facts.hidden_size:,}"
    if len(facts.groups) > 1 or facts.groups[0].unrotated or facts.state_layers:
        yield from (("", _group_description(group)) for group in facts.groups)
    if facts.state_layers:
        state = f"a state, {format_mb(facts.state_bytes)} for each session"
        yield "", f"{facts.state_layers} with {state}"
    if facts.mlp_layers:
        yield "", f"{facts.mlp_layers} with an MLP alone"
    yield "vocabulary", f"{facts.vocabulary:,} tokens"
    has_rope = any(group.unrotated < group.layers for group in facts.groups)
    rope = f"RoPE {facts.rope}" if has_rope else "no RoPE"
    yield "trained", f"to {facts.trained:,} tokens; {rope}"
    size = format_mb(facts.weight_bytes)
    yield "weights", f"{facts.parameters / 1e6:,.1f} million in {facts.dtype}, {size}"
    if facts.sparse_layers:
        layers = f"{facts.sparse_layers} of {facts.layers} layers"
        active_weights = f"{facts.parameters_per_token / 1e6:,.1f} million weights"
        experts = f"{facts.experts_per_token} of {facts.experts}"
        yield "experts", f"{experts} for each token in {layers}: {active_weights}"
    formats = ", ".join(f"{count} in {format_name}" for format_name, count in facts.formats.items())
    read_size = format_mb(facts.bytes_per_token)
    yield "decode", f"{read_size} of weights per token ({formats}); by {facts.decode}"
    yield "prefill", f"products by {facts.prefill}, attention by {facts.attention}"
    sizes = facts.thousand_cells.items()
    yield "1,000 cells", ", ".join(f"{format_mb(size)} in {bits}" for bits, size in sizes)
    if facts.checkpoint_bytes:
        size = f"{format_mb(facts.checkpoint_bytes)} each"
        yield "checkpoints", f"{size}; --checkpoints bounds those of a session"
    weights, cells, states = facts.weight_bytes_held, facts.full_cells, facts.state_bytes
    state_part = f", {format_mb(states)} of states" if states else ""
    parts = f"{format_mb(weights)} of mapped weights and {format_mb(cells)} of cells{state_part}"
    yield "memory", f"{format_mb(weights + cells + states)} at {facts.trained:,} tokens: {parts}"


def _group_description(group: "GroupFacts") -> str:
    """Return a line about a group of layers whose attention has the same shape."""
    attended = "all tokens" if group.window is None else f"the newest {group.window:,} tokens"
    heads = f"{group.kv_heads} KV head{'s' * (group.kv_heads > 1)} of {group.head_dim}"
    part = "" if group.unrotated == group.layers else f"{group.unrotated} of them "
    unrotated = f", {part}without RoPE" if group.unrotated else ""
    shared = f", {group.shared} of them with shared cells" if group.shared else ""
    return f"{group.layers} with {heads}, attending to {attended}{unrotated}{shared}"


@command()
@click.argument("name", shell_complete=complete_models)
@click.argument("folder", type=click.Path(path_type=Path))
def export(name: str, folder: Path, dtype: str = DTYPE_OPTION, quiet: bool = _QUIET_OPTION) -> None:
    """Write model NAME to a new FOLDER in Hugging Face layout, with unpacked weights.

    For transformers and other programs that do not read packed weights. A GGUF file is converted
    first if needed.
    """
    from kvkeep.model import DTYPES
    from kvkeep.models.hub.source import resolve
    from kvkeep.models.weights.export import export as export_model

    export_model(resolve(name, progress=not quiet), folder, DTYPES[dtype], progress=not quiet)
    click.echo(folder)


@command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, shell_complete=complete_models)
def rm(names: tuple[str, ...], yes: bool = option("-y", is_flag=True, help="Do not ask.")) -> None:
    """Remove models, and weights that were converted from them.

    NAME is a name from `kvkeep models list`, or a folder. For a folder of your own, only the packed
    weights that --weights created are removed; for an added model, only its name. Your own folders
    and GGUF files, files in the hub's cache, and sessions are kept; a session can be resumed once
    its model is back. In a terminal, asks for confirmation.
    """
    added_names = named_models()
    # All names are looked up first: an unknown one raises before any model is removed.
    to_remove = dict.fromkeys(_find_removable(name) for name in names if name not in added_names)
    if to_remove and not yes and sys.stdin.isatty():
        click.confirm(f"Remove {', '.join(model.name for model in to_remove)}?", abort=True)
    for model in to_remove:
        has_original = model.path.exists() and not model.path.is_relative_to(home())
        kept_note = f"; {model.path} remains" if has_original else ""
        freed_size = format_mb(remove_model(model, progress=True))
        click.echo(f"removed {model.name}, {freed_size}{kept_note}")
    for name in added_names.keys() & set(names):
        name_path(name).unlink()
        click.echo(f"removed the name {name}; {added_names[name].path} remains")


def _find_removable(name: str) -> LocalModel:
    """Find a pulled model, or packed weights of another folder, by name. Raises ModelNotFound."""
    pulled = pulled_models()
    matches = [model for model in pulled if model.name == name]
    matches = matches or [model for model in pulled if name in (model.path.name, model.slug)]
    matches = matches or [model for model in pulled if model.path == local_folder(name)]
    if matches:
        return matches[0]
    path = Path(os.path.expanduser(name)).resolve()  # it may be gone
    if derived_folders(path):
        return LocalModel(f"packed weights of {path}", path, 0, "", slug="", last_used=0)
    known = ", ".join(model.name for model in pulled) or "none"
    raise ModelNotFound(f"there is no model {name!r} on this machine; there is: {known}")


@command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=complete_models)
def pull(
    name: str,
    with_calibration: bool = option(
        "--calibrate",
        is_flag=True,
        help="Also calibrate it for compression, on Python's manual; takes some minutes.",
    ),
    quiet: bool = _QUIET_OPTION,
) -> None:
    """Download or convert a model, and print its folder.

    NAME is a known name, a hub id (owner/name, or owner/name:Q4_K_M for a GGUF file), or a GGUF
    file to convert. Commands with --model do the same when the model is missing.
    """
    from kvkeep.models.hub.source import resolve

    folder = resolve(name, progress=not quiet, refresh_hub=True)
    click.echo(f"{name} is in {folder}")
    if not with_calibration:
        return
    from kvkeep.cli.compression import measure_calibration, try_measuring_basis
    from kvkeep.compression.calibration.stored import (
        default_calibration,
        unfinished_calibration_path,
    )
    from kvkeep.evaluate.calibrate import has_results
    from kvkeep.evaluate.haystack import manual_text
    from kvkeep.storage.lossy.basis import has_basis

    # In the dtype that commands use by default.
    model = load_by_name(name, "bfloat16", "cpu", weights=None, progress=not quiet)
    is_done, unfinished = default_calibration(model) is not None, unfinished_calibration_path(model)
    if is_done and unfinished.exists():  # perhaps without the basis
        is_done = not has_results(model, model.text.encode(manual_text()), unfinished)
    if not is_done:
        measure_calibration(model, manual_text(), None, quiet=quiet)
        return
    if not quiet:
        say(f"{name} keeps its existing calibration")
    if not has_basis(model.fingerprint.to_dict()):
        try_measuring_basis(model, manual_text(), quiet)
