"""The tools that make a release."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from timeouts import PATIENCE

import kvkeep

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    for name in ("wheels", "release", "audit"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def unpacked(tmp_path: Path, tools: None) -> Path:
    """A folder with links to all files that git tracks, or would track."""
    from wheels import tracked_files

    if not (ROOT / ".git").exists():
        pytest.skip("no clone: git does not say which files are of the release")
    for name in tracked_files():
        (file := tmp_path / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        file.symlink_to(ROOT / name)
    return tmp_path / "sources"


def archive(names: list[str], seconds: int, user: str, mode: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as target:
        for name in names:
            member = tarfile.TarInfo(name)
            member.mtime, member.uname, member.mode, member.size = seconds, user, mode, len(name)
            target.addfile(member, io.BytesIO(name.encode()))
    return file.getvalue()


def test_a_source_archive_has_the_same_bytes_by_any_user_at_any_time(tools: None) -> None:
    from wheels import dated_archive

    first = dated_archive(archive(["a/b", "a/c"], 10, "one", 0o644), 1_000_000)
    second = dated_archive(archive(["a/c", "a/b"], 20, "two", 0o600), 1_000_000)
    assert first == second
    with tarfile.open(fileobj=io.BytesIO(first)) as opened:
        members = opened.getmembers()
        assert [(m.name, m.mtime, m.mode) for m in members] == [
            ("a/b", 1_000_000, 0o644),
            ("a/c", 1_000_000, 0o644),
        ]
        assert opened.extractfile(members[1]).read() == b"a/c"


def test_an_sdist_has_the_files_that_git_tracks_and_nothing_that_it_ignores(
    tools: None, unpacked: Path
) -> None:
    from wheels import tracked_files

    for name in (
        *("docs/node_modules/a.md", "docs/model.gguf", "docs/dist/a.md", "docs/.ruff_cache/a"),
        *("tests/a.safetensors", "tests/page/node_modules/a.js", "tests/.hypothesis/examples/a"),
        *("tests/__pycache__/a.pyc", "tests/.pytest_cache/a", "tests/build/a.py"),
        *("benchmarks/a.json", "benchmarks/build/a.py", "tools/page/node_modules/a/a.py"),
        *("kvkeep/compiled/_avx2.so", "kvkeep/compiled/built.json", "keys"),
    ):
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / name).touch()
    words = [sys.executable, "-W", "ignore", "setup.py", "--quiet", "egg_info"]
    subprocess.run(words, cwd=unpacked, check=True, capture_output=True)
    listed = (unpacked / "kvkeep.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").splitlines()
    assert {name for name in listed if not name.startswith("kvkeep.egg-info/")} == tracked_files()


def test_a_release_names_the_files_that_its_sdist_lacks_or_should_not_have(
    tools: None, tmp_path: Path
) -> None:
    from release import require_sources

    names = ["a-1/PKG-INFO", "a-1/setup.cfg", "a-1/kvkeep.egg-info/SOURCES.txt", "a-1/docs/a.md"]
    source = tmp_path / "a-1.tar.gz"
    source.write_bytes(archive(names, 10, "one", 0o644))
    require_sources(source, {"docs/a.md"})
    with pytest.raises(SystemExit, match=r"lacks: \.gitignore; should not have: docs/a\.md"):
        require_sources(source, {".gitignore"})


def test_the_sbom_names_each_library_that_is_copied_into_the_page(tools: None) -> None:
    from release import page_components

    names = {component["name"].rpartition("/")[2] for component in page_components()}
    assert names == {"cdn-assets", "dompurify", "marked"}
    vendored = {
        file.name.partition(".")[0]
        for file in (ROOT / "kvkeep/server/page/files/vendor").glob("*.LICENSE.txt")
    }
    assert vendored == {"highlight", "marked", "purify"}
    assert all(json.dumps(component).count("pkg:npm/") == 1 for component in page_components())


def test_an_audit_covers_pinned_packages_and_all_that_they_require(tools: None) -> None:
    from audit import releases

    found = releases(sys.executable)
    assert {"h11", "anyio", "httpcore", "certifi", "idna", "urllib3", "pyyaml"} <= set(found)
    assert {"twine", "cyclonedx-bom", "jinja2", "huggingface-hub"} <= set(found)
    assert [release for release in found.values() if "+" in release] == []
    assert "kvkeep" not in found


@pytest.mark.parametrize(
    ("packages", "status", "line"),
    [
        ([("a", None), ("b", None)], 0, "2 of 2 packages audited; advisories for 0"),
        ([("a", None), ("b", "PYSEC-1")], 1, "b 1.0: PYSEC-1, fixed in 1.1"),
        ([("a", "PYSEC-1"), ("b", "skipped")], 1, "not audited: b"),
        ([("a", None), ("b", "skipped")], 2, "1 of 2 packages audited; advisories for 0"),
        ([("a", "skipped"), ("b", "skipped")], 2, "0 of 2 packages audited"),
        ([], 2, "0 of 0 packages audited"),
    ],
)
def test_an_audit_is_clean_only_if_each_package_was_audited(
    tools: None, packages: list[tuple[str, str | None]], status: int, line: str
) -> None:
    from audit import summary

    entries = [
        {"name": name, "skip_reason": "not found"}
        if fault == "skipped"
        else {
            "name": name,
            "version": "1.0",
            "vulns": [{"id": fault, "fix_versions": ["1.1"]}] if fault else [],
        }
        for name, fault in packages
    ]
    lines, found_status = summary(entries)
    assert found_status == status
    assert any(line in text for text in lines)
    assert ("the audit is incomplete" in lines[-1]) == any(
        "skip_reason" in entry for entry in entries or [{"skip_reason": ""}]
    )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("kvkeep-1-py3-none-manylinux_2_27_x86_64.whl", ["aarch64", "macOS"]),
        ("kvkeep-1-py3-none-manylinux_2_27_aarch64.whl", ["x86-64", "macOS"]),
        ("kvkeep-1-py3-none-macosx_14_0_arm64.whl", ["x86-64", "aarch64"]),
    ],
)
def test_a_release_names_each_wheel_that_it_did_not_build(
    tools: None, name: str, missing: list[str]
) -> None:
    from release import wheels_left_out

    lines = wheels_left_out(Path(name))
    assert len(lines) == 2
    assert all(platform in line for platform, line in zip(missing, lines, strict=True))


def test_a_release_without_docker_says_so(tools: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from release import image_left_out

    monkeypatch.setenv("PATH", "")
    assert image_left_out("1") == ["the Docker image (docker is not installed)"]


@pytest.mark.parametrize(
    ("health", "status", "fault"),
    [
        ("healthy", 0, None),
        ("unhealthy", 0, "is unhealthy"),
        ("starting", 0, "is starting"),
        ("healthy", 137, "ended with status 137"),
    ],
)
def test_a_release_starts_a_server_in_the_image_until_it_is_healthy(
    tools: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    health: str,
    status: int,
    fault: str | None,
) -> None:
    """By a program `docker` that says what the real one would."""
    from release import require_serving

    answers = {"Health.Status": health, "Running": "false", "ExitCode": status}
    cases = "".join(f"*.{field}}}}}*) echo {answer};; " for field, answer in answers.items())
    program = tmp_path / "docker"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'case "$*" in run*) echo container;; {cases} esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if fault:
        with pytest.raises(SystemExit, match=fault):
            require_serving("kvkeep:1", tmp_path)
    else:
        require_serving("kvkeep:1", tmp_path)
    assert len((tmp_path / "keys").read_text().strip()) == 64
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == f"run --detach --volume {tmp_path}/keys:/run/secrets/keys:ro kvkeep:1"
    assert calls[-1] == "rm --force --volumes container"


def test_a_wheel_decodes_with_kernels_whatever_faster_ones_need(tools: None) -> None:
    from wheels import decodes_with_kernels

    from kvkeep.executors import ComputePath

    reasons = {"the avx512 kernels": "need a processor with AVX-512"}
    for path, expected in (
        (ComputePath("avx2"), True),
        (ComputePath("avx2", reasons), True),
        (ComputePath("torch", reasons), False),
    ):
        facts = {"kernels": {"name": "avx2"}, "model": {"decode": str(path)}}
        assert decodes_with_kernels(facts) == expected


@pytest.mark.extended
def test_snippets_of_the_readme_are_checked_where_only_an_installed_package_is(
    tmp_path: Path,
) -> None:
    """The tree is that of `require_readme`, without the sources of kvkeep."""
    tree, installed = tmp_path / "tree", tmp_path / "installed"
    shutil.copytree(ROOT / "tests", tree / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml", "docs"):
        (tree / name).symlink_to(ROOT / name)
    installed.mkdir()
    (installed / "kvkeep").symlink_to(Path(kvkeep.__file__).parent)
    words = [sys.executable, "-m", "pytest", "tests/test_docs.py", "-q", "-p", "no:cacheprovider"]
    process = subprocess.run(
        [*words, "-k", "README and (name_exists or sources)"],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert process.returncode == 0, process.stdout
