"""`kvkeep models show`: what a model is, how it is computed here, and what it takes."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kvkeep.cli.completion import model_names
from kvkeep.cli.report import megabytes
from kvkeep.cli.which_model import DTYPE, WEIGHTS
from kvkeep.models.hub.source import DEFAULT_MODEL

if TYPE_CHECKING:
    from kvkeep.model_facts import GroupFacts, ModelFacts


@click.command()
@click.argument("name", default=DEFAULT_MODEL, shell_complete=model_names)
@DTYPE
@WEIGHTS
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(name: str, dtype: str, weights: str | None, as_json: bool) -> None:
    """Show what model NAME is, how it is computed on this machine, and the memory that it takes.

    Its weights are not read. A model that is not here is to be pulled first.
    """
    from kvkeep.model_facts import model_facts

    facts = model_facts(name, dtype, weights)
    if as_json:
        click.echo(json.dumps(asdict(facts), indent=2, ensure_ascii=False))
        return
    for what, value in _lines(facts):
        click.echo(f"{what:<12} {value}")


def _lines(facts: "ModelFacts") -> Iterator[tuple[str, str]]:
    yield "family", facts.architecture
    heads = f"{facts.heads} heads on {facts.kv_heads} KV heads of {facts.head_dim}"
    yield "layers", f"{facts.layers}, {heads}; width {facts.hidden_size:,}"
    if len(facts.groups) > 1 or facts.groups[0].unrotated:
        yield from (("", _group(group)) for group in facts.groups)
    yield "vocabulary", f"{facts.vocabulary:,} tokens"
    yield "trained", f"to {facts.trained:,} tokens; RoPE {facts.rope}"
    size = megabytes(facts.weight_bytes)
    yield "weights", f"{facts.parameters / 1e6:,.1f} million in {facts.dtype}, {size}"
    if facts.sparse_layers:
        yield (
            "experts",
            (
                f"{facts.experts_per_token} of {facts.experts} for each token in "
                f"{facts.sparse_layers} of {facts.layers} layers: "
                f"{facts.parameters_per_token / 1e6:,.1f} million weights"
            ),
        )
    formats = ", ".join(f"{count} in {kind}" for kind, count in facts.formats.items())
    read = megabytes(facts.bytes_per_token)
    yield "a token", f"reads {read}, of matrices {formats}; by {facts.decode}"
    yield "a prompt", f"products by {facts.prefill}, attention by {facts.attention}"
    kinds = ", ".join(f"{megabytes(n)} in {k}" for k, n in facts.thousand_cells.items())
    yield "1,000 cells", kinds
    needed = megabytes(facts.weight_bytes_held + facts.full_cells)
    yield (
        "memory",
        (
            f"{needed} with all {facts.trained:,} tokens: {megabytes(facts.weight_bytes_held)} "
            f"of weights, mapped, and {megabytes(facts.full_cells)} of cells"
        ),
    )


def _group(group: "GroupFacts") -> str:
    sees = "every token" if group.window is None else f"the newest {group.window:,} tokens"
    heads = f"{group.kv_heads} KV head{'s' * (group.kv_heads > 1)} of {group.head_dim}"
    unrotated = f", {group.unrotated} of them without RoPE" if group.unrotated else ""
    shared = f", {group.shared} of them by others' cells" if group.shared else ""
    return f"{group.layers} with {heads} see {sees}{unrotated}{shared}"
