"""Build and test a release; upload it with `--publish`: `make release`.

Builds and checks the wheel and the sdist (tools/wheels.py, twine), builds them again to compare
their bytes, and writes an SBOM, and the documentation in site/<version>. Then, outside of the
clone, runs `make run` in the unpacked sdist, and every snippet of README.md with the installed
wheel. Where docker's daemon answers, builds the image, and starts a server in it. The last lines
say what was left out.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
from collections.abc import Set
from pathlib import Path

from wheels import (
    DIST,
    ROOT,
    build_and_try,
    require_same_bytes,
    run,
    torch_release,
    tracked_files,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--publish", action="store_true", help="upload with twine after all checks have passed"
    )
    parser.add_argument(
        "--unfinished",
        action="store_true",
        help="accept uncommitted changes, or an untagged commit",
    )
    options = parser.parse_args()
    version = project_version()
    if options.publish and options.unfinished:
        sys.exit("--publish cannot be combined with --unfinished")
    if not options.unfinished:
        require_tagged_commit(version)
    wheel, source = build_and_try()
    require_sources(source, tracked_files())
    require_same_bytes(wheel, source)
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    site = ROOT / "site" / version
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    run(
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--site-dir",
        site,
        environment=environment,
        at=ROOT,
    )
    with tempfile.TemporaryDirectory(prefix="kvkeep-release-") as folder:
        require_readme(wheel, source, Path(folder))
        bill = write_sbom(wheel, DIST / f"kvkeep-{version}.cdx.json", Path(folder))
    left_out = [*image_left_out(version), *wheels_left_out(wheel)]
    for artifact in (wheel, source, bill, site):
        print(artifact.relative_to(ROOT))
    for line in left_out:
        print("left out:", line)
    if options.publish:
        run(sys.executable, "-m", "twine", "upload", wheel, source)
    else:
        print("built and tested; not uploaded (use --publish)")


def project_version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def require_tagged_commit(version: str) -> None:
    """Exit with an error unless this is the tagged commit of the release."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## (.*)$", changes, re.MULTILINE)
    if heading is None or not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", heading[1]):
        sys.exit(f"CHANGELOG.md must begin with `## {version}, YYYY-MM-DD` (or add --unfinished)")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout:
        sys.exit("there are uncommitted changes (or add --unfinished)")
    tags = subprocess.run(["git", "tag", "--points-at"], cwd=ROOT, capture_output=True, text=True)
    if f"v{version}" not in tags.stdout.split():
        sys.exit(f"this commit is not tagged v{version} (or add --unfinished)")


def require_sources(source: Path, expected: Set[str]) -> None:
    """Exit with an error unless the sdist has these files, and no others than a build adds."""
    with tarfile.open(source) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    names -= {"PKG-INFO", "setup.cfg"}
    names = {name for name in names if not name.startswith("kvkeep.egg-info/")}
    if names != expected:
        sys.exit(
            f"{source.name} lacks: {', '.join(sorted(expected - names)) or 'nothing'}; should not "
            f"have: {', '.join(sorted(names - expected)) or 'nothing'} (see MANIFEST.in)"
        )


def require_readme(wheel: Path, source: Path, folder: Path) -> None:
    """Without a clone, run `make run` in the sdist, and the README's snippets with the wheel."""
    with tarfile.open(source) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.glob("kvkeep-*")
    environment = dict(os.environ)
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "KVKEEP_HOME"):
        environment.pop(name, None)
    run("make", "run", environment=environment, at=tree)
    shutil.rmtree(tree / "kvkeep")  # the wheel's package is used from here on
    shutil.rmtree(tree / ".venv")
    venv.create(folder / "empty", with_pip=True)
    python = folder / "empty" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, f"torch=={torch_release()}", environment=environment, at=tree)
    run(*pip, f"{wheel}[plot,test]", environment=environment, at=tree)
    tests = ["tests/test_docs.py", "-k", "README", "-q", "-p", "no:cacheprovider"]
    print(run(python, "-m", "pytest", *tests, environment=environment, at=tree))


def write_sbom(wheel: Path, file: Path, folder: Path) -> Path:
    """Write the components of a server as CycloneDX: packages, and the libraries of the web UI."""
    venv.create(folder / "server", with_pip=True)
    python = folder / "server" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, f"torch=={torch_release()}", at=folder)
    run(*pip, f"{wheel}[server,object-store]", at=folder)
    options = ["--output-reproducible", "--pyproject", ROOT / "pyproject.toml", "-o", file]
    run(sys.executable, "-m", "cyclonedx_py", "environment", *options, python)
    bill = json.loads(file.read_text(encoding="utf-8"))
    bill["components"] += page_components()
    file.write_text(json.dumps(bill, indent=2) + "\n", encoding="utf-8")
    return file


def image_left_out(version: str) -> list[str]:
    """Build the Docker image and start a server in it; return why not, as no or one line."""
    if shutil.which("docker") is None:
        return ["the Docker image (docker is not installed)"]
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        return ["the Docker image (docker's daemon does not answer)"]
    image = f"kvkeep:{version}"
    run("docker", "build", "--tag", image, ROOT)
    if version not in run("docker", "run", "--rm", image, "--version"):
        sys.exit(f"the image does not have version {version}")
    with tempfile.TemporaryDirectory(prefix="kvkeep-image-") as folder:
        require_serving(image, Path(folder))
    return []


def require_serving(image: str, folder: Path) -> None:
    """Exit with an error unless a container gets healthy, and stops before docker kills it."""
    keys = folder / "keys"
    keys.write_text(f"{secrets.token_hex(32)}\n", encoding="utf-8")
    keys.chmod(0o644)  # for the container's user
    mount = f"{keys}:/run/secrets/keys:ro"
    container = run("docker", "run", "--detach", "--volume", mount, image).strip()

    def state(field: str) -> str:
        words = ["docker", "inspect", "--format", f"{{{{.State.{field}}}}}", container]
        return subprocess.check_output(words, text=True).strip()

    try:
        while (health := state("Health.Status")) == "starting" and state("Running") == "true":
            time.sleep(2)  # while it fetches the model; docker ends this period
        if health != "healthy":
            print(run("docker", "logs", container))
            sys.exit(f"the server in {image} is {health}")
        run("docker", "stop", container)
        if (status := state("ExitCode")) != "0":
            sys.exit(f"the server in {image} ended with status {status}")
    finally:
        run("docker", "rm", "--force", "--volumes", container)


def wheels_left_out(wheel: Path) -> list[str]:
    """Return a line for each platform whose wheel is to be built on a machine of its own."""
    platforms = {
        "x86_64.whl": "Linux on x86-64",
        "aarch64.whl": "Linux on aarch64 (`make emulated` tests its kernels here)",
        "arm64.whl": "macOS on arm64",
    }
    return [
        f"the wheel for {platform}: run `make wheel` on such a machine"
        for suffix, platform in platforms.items()
        if not wheel.name.endswith(suffix)
    ]


def page_components() -> list[dict[str, str]]:
    """Return the libraries that are copied into the web UI (tools/page/vendor.mjs)."""
    manifest = json.loads((ROOT / "tools/page/package.json").read_text(encoding="utf-8"))
    return [
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name.replace('@', '%40')}@{version}",
            "bom-ref": f"page-{name}",
        }
        for name, version in manifest["dependencies"].items()
    ]


if __name__ == "__main__":
    main()
