"""The generated reference pages of the site list every command and every route."""

from kvkeep.cli.main import COMMANDS
from tools.reference import api_page, commands_page


def test_the_page_of_commands_has_each_command_and_subcommand() -> None:
    page = commands_page()
    assert [name for name in COMMANDS if f"\n## kvkeep {name}\n" not in page] == []
    assert "\n## kvkeep sessions fork\n" in page
    assert "--max-kv-size" in page


def test_the_page_of_the_api_has_each_route_once_with_its_fields() -> None:
    page = api_page()
    for route in (
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /v1/sessions",
        "GET /health",
    ):
        assert page.count(f"\n### `{route}`\n") == 1
    assert "| `recompute` | body | `none` or `suffix`, default `none` |" in page
    assert "| 409 | The session is busy. |" in page
