"""Writes THIRD_PARTY.md: the crates that the command holds, their licences and their notices.

    python3 tests/third_party.py > THIRD_PARTY.md

It describes a build for Linux on x86_64 with the feature mistralrs, without the crates that only tests need. Once such
a build has been made, the script needs no network.
"""

import json
import pathlib
import subprocess

# C libraries in a crate's sources, that the crate's own licence does not cover.
CARRIED = {
    "libsais-sys": "libsais: Apache-2.0",
    "onig_sys": "Oniguruma: BSD-2-Clause",
    "tikv-jemalloc-sys": "jemalloc: BSD-2-Clause",
}

HEADER = """# Third-party notices

The command `laser` is built from the crates below, unchanged, each under its own licence; where a licence offers a
choice, Laser takes Apache-2.0 or MIT. Their sources are public under name and version. Images hold the texts of the
licences in `/usr/share/doc/laser/licences.tar.gz`.

`python3 tests/third_party.py > THIRD_PARTY.md` writes this page; a test holds it against Cargo.lock.
"""


def packages():
    """The packages of the command from elsewhere, with their dependencies, sorted by name."""
    command = "cargo metadata --format-version 1 --locked --offline --features mistralrs".split()
    command += ["--filter-platform", "x86_64-unknown-linux-gnu"]
    metadata = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    seen, stack = set(), [metadata["resolve"]["root"]]
    while stack:
        package = stack.pop()
        if package not in seen:
            seen.add(package)
            kept = (d for d in nodes[package]["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"]))
            stack.extend(d["pkg"] for d in kept)
    found = (p for p in metadata["packages"] if p["id"] in seen and p["source"])
    return sorted(found, key=lambda p: (p["name"], p["version"]))


def notices(found):
    """The texts of the packages' NOTICE files, each with the packages that have it."""
    texts = {}
    for package in found:
        for file in sorted(pathlib.Path(package["manifest_path"]).parent.glob("NOTICE*")):
            text = file.read_text(encoding="utf-8").strip()
            texts.setdefault(text, []).append(package["name"])
    return texts


def main():
    found = packages()
    print(HEADER)
    print("| Crate | Version | Licence | Source |\n|---|---|---|---|")
    for p in found:
        licence = p["license"] or p["license_file"]
        if p["name"] in CARRIED:
            licence += f"; {CARRIED[p['name']]}"
        print(f"| {p['name']} | {p['version']} | {licence} | {p['repository'] or p['homepage'] or ''} |")
    print("\n## Notices")
    for text, names in notices(found).items():
        print(f"\n{', '.join(names)}:\n\n```text\n{text}\n```")


main()
