"""Audit kvkeep and the packages that it is tested with: `make audit`.

    python tools/audit.py [--python PYTHON]

bandit looks for unsafe code in kvkeep/, and pip-audit for published advisories of each package
that is installed for PYTHON or pinned in constraints.txt. The exit status is 0 if all packages were
audited and nothing was found, 1 if something was found, and 2 if nothing was found but a package
could not be audited. Needs bandit, pip-audit, and the index of packages on the network.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CLEAN, FOUND, INCOMPLETE = 0, 1, 2
LIST_INSTALLED = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions()}))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="of the environment to audit")
    options = parser.parse_args()
    bandit = run_bandit()
    print("bandit: no finding in kvkeep/" if bandit == CLEAN else "bandit: see above")
    packages = audited_packages(releases(options.python))
    lines, status = summary(packages)
    print("\n".join(lines))
    sys.exit(FOUND if bandit != CLEAN else status)


def run_bandit() -> int:
    words = ["--quiet", "--recursive", "--configfile", "pyproject.toml", "kvkeep"]
    return subprocess.run(
        [sys.executable, "-m", "bandit", *words], cwd=ROOT, check=False
    ).returncode


def releases(python: str) -> dict[str, str]:
    """Return the releases by package: of all that are installed for a Python, or pinned.

    Without kvkeep, and without the local part of a release such as 2.13.0+cpu, which no index has.
    """
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    installed = json.loads(subprocess.check_output([python, "-c", LIST_INSTALLED], text=True))
    found = {
        name.lower().replace("_", "-").replace(".", "-"): release.partition("+")[0]
        for name, release in {**pins, **installed}.items()
    }
    found.pop("kvkeep", None)
    return found


def audited_packages(releases: Mapping[str, str]) -> Sequence[Mapping[str, Any]]:
    """Return pip-audit's entry of each package; none if it fails."""
    words = ["--no-deps", "--disable-pip", "--format", "json", "--requirement"]
    with tempfile.TemporaryDirectory(prefix="kvkeep-audit-") as folder:
        file = Path(folder) / "requirements.txt"
        file.write_text("".join(f"{name}=={release}\n" for name, release in releases.items()))
        # Its stderr says "No known vulnerabilities found" also of skipped packages: not shown.
        process = subprocess.run(
            [sys.executable, "-m", "pip_audit", *words, str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        packages: Sequence[Mapping[str, Any]] = json.loads(process.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(process.stderr, file=sys.stderr)
        return ()
    return packages


def summary(packages: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """Return the lines of a report and the exit status. packages: entries of pip-audit's JSON."""
    skipped = [package for package in packages if "skip_reason" in package]
    audited = [package for package in packages if "skip_reason" not in package]
    found = [package for package in audited if package["vulns"]]
    lines = [
        f"pip-audit: {package['name']} {package['version']}: {vulnerability['id']}, "
        f"fixed in {', '.join(vulnerability['fix_versions']) or 'no release'}"
        for package in found
        for vulnerability in package["vulns"]
    ]
    lines.append(f"pip-audit: {len(audited)} of {len(packages)} packages audited")
    if audited:
        lines[-1] += f"; advisories for {len(found)}"
    if skipped:
        names = ", ".join(package["name"] for package in skipped)
        lines.append(f"pip-audit: not audited: {names}")
        lines.append(f"pip-audit: the first reason: {skipped[0]['skip_reason']}")
    is_complete = bool(audited) and not skipped
    if not is_complete:
        lines.append("the audit is incomplete: run it where the index of packages can be reached")
    return lines, FOUND if found else CLEAN if is_complete else INCOMPLETE


if __name__ == "__main__":
    main()
