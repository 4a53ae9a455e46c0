"""Builds a release and tries it; uploads it where that is asked for: `make release`.

The wheel and the sdist are built and checked (tools/wheels.py, twine), and so is the documentation,
as site/<version>. Then they are all that there is: in an environment of the wheel, beside what the
sdist holds, every line of README.md runs, and `make run` in the sdist does.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

from wheels import ROOT, build_and_try, run, torch_release


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--publish", action="store_true", help="upload with twine, once all of it has passed"
    )
    parser.add_argument(
        "--unfinished", action="store_true", help="also of a tree with changes, or of no release"
    )
    asked = parser.parse_args()
    version = project_version()
    if asked.publish and asked.unfinished:
        sys.exit("what is not finished is not published")
    if not asked.unfinished:
        require_finished(version)
    wheel, source = build_and_try()
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
    for each in (wheel, source, site):
        print(each.relative_to(ROOT))
    if asked.publish:
        run(sys.executable, "-m", "twine", "upload", wheel, source)
    else:
        print("built and tried; nothing was uploaded (--publish does)")


def project_version() -> str:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def require_finished(version: str) -> None:
    """Ends with an error where this is not the commit of that release."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## (.*)$", changes, re.MULTILINE)
    if heading is None or not re.fullmatch(rf"{re.escape(version)}, \d{{4}}-\d\d-\d\d", heading[1]):
        sys.exit(f"CHANGELOG.md must begin with `## {version}, YYYY-MM-DD` (or add --unfinished)")
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True).stdout:
        sys.exit("there are changes that are not committed (or add --unfinished)")
    tags = subprocess.run(["git", "tag", "--points-at"], cwd=ROOT, capture_output=True, text=True)
    if f"v{version}" not in tags.stdout.split():
        sys.exit(f"this commit is not tagged v{version} (or add --unfinished)")


def require_readme(wheel: Path, source: Path, folder: Path) -> None:
    """Every line of README.md, where there is no clone."""
    with tarfile.open(source) as packed:
        packed.extractall(folder, filter="data")
    (tree,) = folder.glob("kvkeep-*")
    outside = dict(os.environ)
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "KVKEEP_HOME"):
        outside.pop(name, None)
    run("make", "run", environment=outside, at=tree)
    shutil.rmtree(tree / "kvkeep")  # from here on it is the wheel's
    shutil.rmtree(tree / ".venv")
    venv.create(folder / "empty", with_pip=True)
    python = folder / "empty" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(*pip, f"torch=={torch_release()}", environment=outside, at=tree)
    run(*pip, f"{wheel}[plot,test]", environment=outside, at=tree)
    tests = ["tests/test_docs.py", "-k", "README and not sources", "-q", "-p", "no:cacheprovider"]
    print(run(python, "-m", "pytest", *tests, environment=outside, at=tree))


if __name__ == "__main__":
    main()
