"""Options declared as defaults of parameters and of records' fields."""

import os
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from cli.conftest import Invoke
from click.testing import CliRunner

from kvkeep.cli.options import command, integer_option, option, option_group


@dataclass(frozen=True)
class Depth:
    max_depth: int = integer_option("-d", default=3, help="How deep.")


@dataclass(frozen=True)
class Search:
    depth: Depth = option_group(Depth)
    follows_links: bool = option("--follow", is_flag=True)


@command()
@click.argument("folder")
def find(folder: str, search: Search = option_group(Search), name: str = option()) -> None:
    click.echo(f"{folder} {search} {name}")


@command()
def shallow(depth: Depth = option_group(Depth, max_depth=option(default=1))) -> None:
    click.echo(depth)


def output_of(example: click.Command, *arguments: str) -> str:
    return CliRunner().invoke(example, arguments, catch_exceptions=False).output.strip()


def test_records_are_built_from_the_options_in_their_fields() -> None:
    search = Search(Depth(5), follows_links=True)
    assert output_of(find, "-d", "5", "--follow", "--name", "x", "/tmp") == f"/tmp {search} x"
    search = Search(Depth(3), follows_links=False)
    assert output_of(find, "--max-depth", "3", "/tmp") == f"/tmp {search} None"


def test_a_command_may_declare_an_option_of_a_record_anew() -> None:
    assert output_of(shallow) == str(Depth(1))
    assert "No such option" in output_of(shallow, "-d", "2")


def test_help_lists_options_in_the_order_of_their_declarations() -> None:
    lines = output_of(find, "--help").splitlines()
    flags = ["-d, --max-depth N", "--follow", "--name TEXT", "--help"]
    positions = [next(i for i, line in enumerate(lines) if flag in line) for flag in flags]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("chat", "--api-key", "x"), "add --server URL"),
        (("chat", "--secret-file", __file__), "add --prefix-cache"),
        (("generate", "-p", "x", "--secret-file", __file__, "--prefix-cache"), "--store URL"),
        (("serve", "--secret-file", __file__, "--store", "folder"), "add --store URL"),
        (("batch", "-", "-o", "out", "--store", "folder"), "add --prefix-cache"),
        (("grid", "--from", __file__, "--kv-bits", "8"), "leave out --kv-bits"),
        (("grid", "--from", __file__, "--methods", "knorm"), "leave out --methods"),
    ],
    ids=["chat key", "chat secret", "secret", "serve", "batch", "grid bits", "grid methods"],
)
def test_options_that_would_do_nothing_are_refused(
    invoke: Invoke,
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the model is looked up."""
    monkeypatch.chdir(tmp_path)
    refused = invoke(*arguments, "-m", "no-such-model", input='{"prompt": "x"}')
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert os.listdir(tmp_path) == []
