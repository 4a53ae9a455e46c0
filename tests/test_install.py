"""Installation: the container files, docs/install.md and the package's metadata agree."""

import fnmatch
import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from packaging.requirements import Requirement

import kvkeep
from kvkeep.cli.main import COMMANDS, main
from kvkeep.server.security import PUBLIC_PATHS

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSTALL_PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, " ".join(arguments.split())) for name, arguments in lines]


def last_stage(name: str) -> list[str]:
    """Return the arguments of this instruction in the stage that runs."""
    all_of_them = instructions()
    start = max(i for i, (instruction, _) in enumerate(all_of_them) if instruction == "FROM")
    return [arguments for instruction, arguments in all_of_them[start:] if instruction == name]


def copied_from_the_clone() -> list[str]:
    copies = [arguments.split() for name, arguments in instructions() if name == "COPY"]
    return [path for words in copies if "--from" not in words[0] for path in words[:-1]]


def is_sent_to_the_builder(path: str) -> bool:
    """Whether .dockerignore lets a path through: its last matching line decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.lstrip("!")
        parts = [path, *map(str, Path(path).parents)]
        names = parts if "**/" not in pattern else [Path(part).name for part in parts]
        if line[:1] not in ("", "#") and any(
            fnmatch.fnmatchcase(name, pattern.removeprefix("**/")) for name in names
        ):
            sent = line.startswith("!")
    return sent


def test_the_release_has_one_number() -> None:
    assert kvkeep.__version__ == PROJECT["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {kvkeep.__version__}, " in changes
    assert f"/kvkeep-{kvkeep.__version__}-py3-none-" in INSTALL_PAGE


def test_the_dockerfile_copies_all_that_a_build_reads() -> None:
    copied = copied_from_the_clone()
    assert {path for path in copied if not (ROOT / path).exists()} == set()
    assert {path for path in copied if not is_sent_to_the_builder(path)} == set()
    # setup.py reads README.md, and pyproject.toml names the license.
    assert {"kvkeep", "setup.py", "pyproject.toml", "README.md", "LICENSE"} <= set(copied)


def test_every_source_is_sent_to_the_builder_and_nothing_else() -> None:
    sources = (ROOT / "kvkeep" / "compiled" / "src").iterdir()
    assert all(is_sent_to_the_builder(str(file.relative_to(ROOT))) for file in sources)
    kept_out = ("keys", ".git/config", ".venv/bin/python", "kvkeep/compiled/_avx2.so", "tests/a.py")
    assert [path for path in kept_out if is_sent_to_the_builder(path)] == []


def test_the_container_serves_as_its_own_user_with_keys() -> None:
    assert last_stage("USER")[-1] not in ("root", "0")
    assert json.loads(last_stage("ENTRYPOINT")[-1]) == ["kvkeep"]
    words = json.loads(last_stage("CMD")[-1])
    assert (words[0], words[words.index("--host") + 1]) == ("serve", "0.0.0.0")
    ports = [p.default for p in COMMANDS["serve"].load().params if "--port" in p.opts]
    assert ports == [int(port) for port in last_stage("EXPOSE")]
    # The keys are needed: without them the command is refused.
    keys = words.index("--api-key-file")
    result = CliRunner().invoke(main, [*words[:keys], *words[keys + 2 :]])
    assert (result.exit_code, "--api-key-file" in result.output) == (2, True)


class Health(BaseHTTPRequestHandler):
    """Answers as a server does: /health with the status, everything else with 401."""

    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path in PUBLIC_PATHS else 401)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_requests_a_public_route_through_no_proxy(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (check,) = last_stage("HEALTHCHECK")
    (_, option, code) = json.loads(check[check.index("[") :])
    monkeypatch.setattr(Health, "status", status)
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        words = [
            sys.executable,
            option,
            code.replace(last_stage("EXPOSE")[0], f"{server.server_port}"),
        ]
        proxies = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        process = subprocess.run(words, env={**os.environ, **proxies}, check=False)
    assert process.returncode == (status != 200)


def test_a_container_has_time_to_save_sessions_before_it_is_killed() -> None:
    graces = [p.default for p in COMMANDS["serve"].load().params if "--grace" in p.opts]
    words = json.loads(last_stage("CMD")[-1])
    assert float(words[words.index("--grace") + 1]) <= 5  # docker kills after 10 s
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    seconds = [int(compose["services"]["kvkeep"]["stop_grace_period"].removesuffix("s"))]
    serving = [
        line.split()
        for line in INSTALL_PAGE.splitlines()
        if line.startswith("docker run") and "--publish" in line
    ]
    assert len(serving) == 2
    seconds += [int(line[line.index("--stop-timeout") + 1]) for line in serving]
    assert all(second >= graces[0] + 15 for second in seconds)


def test_compose_mounts_what_the_image_reads() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    service: dict[str, Any] = compose["services"]["kvkeep"]
    (volume,) = last_stage("VOLUME")
    assert f"KVKEEP_HOME={volume}" in last_stage("ENV")[-1].split()
    name, _, target = service["volumes"][0].partition(":")
    assert (target, name in compose["volumes"]) == (volume, True)
    (secret,) = service["secrets"]
    assert f"/run/secrets/{secret}" in json.loads(last_stage("CMD")[-1])
    # The file with the keys is neither committed nor sent to the builder.
    file = compose["secrets"][secret]["file"]
    assert f"/{file}" in (ROOT / ".gitignore").read_text().splitlines()
    assert service["ports"] == [f"127.0.0.1:{(port := last_stage('EXPOSE')[0])}:{port}"]


def test_named_extras_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "kvkeep").rglob("*.py")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    named = {
        extra
        for extras in re.findall(r"(?:kvkeep|'\.)\[([a-z,-]+)\]", text)
        for extra in extras.split(",")
    }
    assert "server" in named
    assert named <= set(PROJECT["optional-dependencies"])


def test_every_extra_for_users_is_on_the_install_page() -> None:
    shown = set(re.findall(r"^\| `kvkeep\[([a-z-]+)\]`", INSTALL_PAGE, re.MULTILINE))
    assert shown == set(PROJECT["optional-dependencies"]) - {"test", "docs", "release", "dev"}


def pinned_releases() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): release for name, release in pairs}


@pytest.mark.parametrize("extra", ["", "server", "object-store", "transformers", "plot"])
def test_constraints_pin_each_direct_requirement(extra: str) -> None:
    listed = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    requirements = [Requirement(line) for line in listed]
    pinned = pinned_releases()
    names = {r.name.lower().replace("_", "-"): r for r in requirements}
    assert set(names) - set(pinned) <= {"pip"}  # an environment comes with its own
    wrong = [n for n, r in names.items() if n != "pip" and pinned[n] not in r.specifier]
    assert wrong == []


def test_no_requirement_is_a_library_of_a_gpu() -> None:
    """Not of the package, and no release of constraints.txt is of PyTorch's CUDA build."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    names = {Requirement(line).name for line in lines} | set(pinned_releases())
    assert {name for name in names if re.match(r"nvidia|cuda|triton|cupy|jax", name)} == set()
    assert "+" not in pinned_releases()["torch"]


def test_make_run_installs_what_the_commands_of_the_readme_need() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    product = makefile.partition("\n$(PRODUCT):")[2].partition("\n\n")[0]
    assert "make run" in readme
    assert "\nkvkeep serve" in readme
    assert "--editable '.[server]'" in product
