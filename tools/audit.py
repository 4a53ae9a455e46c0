"""Audit kvkeep and the packages that it is tested with: `make audit`.

    python tools/audit.py [--requirement FILE]

bandit looks for unsafe code in kvkeep/, and pip-audit for published advisories of each pinned
package. The exit status is 0 if all packages were audited and nothing was found, 1 if something was
found, and 2 if nothing was found but a package could not be audited. Needs bandit, pip-audit, and
the index of packages on the network.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CLEAN, FOUND, INCOMPLETE = 0, 1, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requirement", type=Path, default=ROOT / "constraints.txt")
    options = parser.parse_args()
    bandit = run_bandit()
    print("bandit: no finding in kvkeep/" if bandit == CLEAN else "bandit: see above")
    packages = audited_packages(options.requirement)
    lines, status = summary(packages)
    print("\n".join(lines))
    sys.exit(FOUND if bandit != CLEAN else status)


def run_bandit() -> int:
    words = ["--quiet", "--recursive", "--configfile", "pyproject.toml", "kvkeep"]
    return subprocess.run(
        [sys.executable, "-m", "bandit", *words], cwd=ROOT, check=False
    ).returncode


def audited_packages(requirement: Path) -> Sequence[Mapping[str, Any]]:
    """Return pip-audit's entry of each package of a requirements file; none if it fails."""
    words = ["--requirement", str(requirement), "--no-deps", "--disable-pip", "--format", "json"]
    # Its stderr says "No known vulnerabilities found" also of packages that it skipped: not shown.
    process = subprocess.run(
        [sys.executable, "-m", "pip_audit", *words], capture_output=True, text=True, check=False
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
