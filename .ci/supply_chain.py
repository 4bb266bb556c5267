"""The packages of this environment: bill of materials, recorded hashes, and a check of an install.

python .ci/supply_chain.py sbom              writes a CycloneDX 1.6 document to the terminal
python .ci/supply_chain.py record            writes .ci/hashes.txt: all files of each version
python .ci/supply_chain.py check REPORT ...  compares `pip install --report REPORT` with it
"""

import json
import os
import re
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
HASHES = ROOT / ".ci" / "hashes.txt"
PROJECT = "postgrad"
EXTRAS = ("dev", "gguf", "track", "cluster")  # what CI installs
RECORDED_PYTHONS = ((3, 11), (3, 12), (3, 13))
PYPI = "https://pypi.org/simple"


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def requirements_of(package: Distribution, extras: tuple[str, ...]) -> list[Requirement]:
    """Returns the requirements that hold in this environment with these extras."""
    found = []
    for text in package.requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in ("", *extras)):
            found.append(requirement)
    return found


def closure() -> dict[str, tuple[Distribution, list[str]]]:
    """Returns each installed package that the project needs: (package, names it needs)."""
    packages: dict[str, tuple[Distribution, list[str]]] = {}
    seen_extras: dict[str, set[str]] = {}
    waiting: list[tuple[str, tuple[str, ...]]] = [(PROJECT, EXTRAS)]
    while waiting:
        name, extras = waiting.pop()
        package = installed(name)
        if package is None or (name in packages and set(extras) <= seen_extras[name]):
            continue
        seen_extras.setdefault(name, set()).update(extras)
        needed = requirements_of(package, tuple(sorted(seen_extras[name])))
        names = sorted({normalized(r.name) for r in needed if installed(r.name)})
        packages[name] = (package, names)
        waiting += [(normalized(r.name), tuple(sorted(r.extras))) for r in needed]
    return packages


# ---- bill of materials


def sbom() -> str:
    """Returns the packages and their dependencies as a CycloneDX 1.6 document."""
    packages = closure()
    components = []
    for name, (package, _) in sorted(packages.items()):
        if name == PROJECT:
            continue
        component = {
            "type": "library",
            "bom-ref": reference(name, package),
            "name": name,
            "version": package.version,
            "purl": reference(name, package),
        }
        license_text = package.metadata.get("License-Expression") or package.metadata.get("License")
        if license_text and "\n" not in license_text:
            component["licenses"] = [{"license": {"name": license_text}}]
        components.append(component)
    project = packages[PROJECT][0]
    root = reference(PROJECT, project)
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": root,
                "name": PROJECT,
                "version": project.version,
            }
        },
        "components": components,
        "dependencies": [
            {
                "ref": reference(name, package),
                "dependsOn": [reference(n, packages[n][0]) for n in names if n in packages],
            }
            for name, (package, names) in sorted(packages.items())
        ],
    }
    return json.dumps(document, indent=1)


def reference(name: str, package: Distribution) -> str:
    return f"pkg:pypi/{name}@{package.version}"


# ---- hashes


def record() -> None:
    """Writes the hashes of all files of each installed version, for every platform."""
    versions = {name: package.version for name, (package, _) in sorted(closure().items())}
    del versions[PROJECT]
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(published_hashes, versions.keys(), versions.values())
    lines = []
    for (name, version), hashes in zip(versions.items(), found, strict=True):
        if hashes:
            lines.append(f"{name}=={version} {' '.join(f'sha256:{h}' for h in hashes)}\n")
        else:
            print(f"no files of {name} {version} in the index", file=sys.stderr)
    HASHES.write_text("".join(lines))


def published_hashes(name: str, version: str) -> list[str]:
    """Returns the hashes of a version's Linux wheels for CPython 3.11 to 3.13, and its sdist."""
    request = urllib.request.Request(
        f"{index_url().rstrip('/')}/{name}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json, text/html;q=0.5"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        body = response.read().decode()
        kind = response.headers.get_content_type()
    files = _files_of_json(body) if "json" in kind else _files_of_html(body)
    return sorted({digest for file, digest in files if is_used(file, name, version)})


def _files_of_json(body: str) -> list[tuple[str, str]]:
    files = json.loads(body)["files"]
    return [(file["filename"], file["hashes"].get("sha256", "")) for file in files]


def _files_of_html(body: str) -> list[tuple[str, str]]:
    return re.findall(r'/([^/"#]+)#sha256=([0-9a-f]{64})', body)


def is_used(file: str, name: str, version: str) -> bool:
    """Returns whether an environment of CI or of a Linux user may install this file."""
    stem = re.sub(r"\.(tar\.gz|zip)$", "", file)
    if stem != file:
        found, _, of = stem.rpartition("-")
        return normalized(found) == name and of == version
    parts = file.removesuffix(".whl").split("-")
    if len(parts) < 5 or normalized(parts[0]) != name or parts[1] != version:
        return False
    python, platform = parts[-3], parts[-1]
    linux = platform == "any" or ("linux" in platform and re.search("x86_64|aarch64", platform))
    return bool(linux) and bool(re.search(r"py3|py2\.py3|cp311|cp312|cp313|abi3", python + file))


def index_url() -> str:
    """Returns the package index that pip uses here."""
    if url := os.environ.get("PIP_INDEX_URL"):
        return url
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or PYPI


def recorded() -> dict[tuple[str, str], set[str]]:
    """Returns (name, version) -> hashes of .ci/hashes.txt."""
    table = {}
    for line in HASHES.read_text().splitlines():
        pin, *hashes = line.split()
        name, version = pin.split("==")
        table[name, version] = set(hashes)
    return table


def check(reports: list[str]) -> int:
    """Compares the files that pip installed with the recorded hashes; returns an exit code.

    A recorded version with another hash is an error. Other versions and files of this machine are
    counted: an index may be ahead of the record, and a build such as +cpu has files of its own.
    """
    if sys.platform != "linux" or sys.version_info[:2] not in RECORDED_PYTHONS:
        print("packages: hashes are recorded for Linux and CPython 3.11 to 3.13 only")
        return 0
    table = recorded()
    equal = 0
    others = []
    wrong = []
    for report in reports:
        for item in json.loads(Path(report).read_text())["install"]:
            name = normalized(item["metadata"]["name"])
            key = (name, item["metadata"]["version"])
            archive = item["download_info"].get("archive_info", {})
            digest = archive.get("hashes", {}).get("sha256", "")
            is_local = item["download_info"].get("url", "").startswith("file:")
            if key not in table or not digest or is_local:
                others.append(name)
            elif f"sha256:{digest}" in table[key]:
                equal += 1
            else:
                wrong.append(f"{name} {key[1]} has sha256:{digest}")
    print(f"packages: {equal} as recorded, {len(others)} of other versions, {len(wrong)} changed")
    for line in wrong:
        print(f"the file of {line}, which .ci/hashes.txt does not have for this version")
    return 1 if wrong else 0


def main(arguments: list[str]) -> int:
    if arguments == ["sbom"]:
        print(sbom())
        return 0
    if arguments == ["record"]:
        record()
        return 0
    if arguments[:1] == ["check"] and len(arguments) > 1:
        return check(arguments[1:])
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
