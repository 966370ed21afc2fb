# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Where Debian packages come from, and a tree made of them.

The archive is the one that this machine's own apt uses. A machine that has none (another distribution) names one in
the environment variable VMLAB_DEBIAN_ARCHIVE.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vmlab.errors import NoArchive

VARIABLE: Final = "VMLAB_DEBIAN_ARCHIVE"
KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SOURCES: Final = Path("/etc/apt")

_ONE_LINE: Final = re.compile(r"^\s*deb\s+(?:\[[^\]]*\]\s+)?(\S+)\s+\S+", re.MULTILINE)
_URIS: Final = re.compile(r"^URIs:\s*(.+)$", re.MULTILINE | re.IGNORECASE)
_SCHEMES: Final = ("http://", "https://", "file:/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A root folder to be made from packages: PACKAGE or PACKAGE/SUITE each."""

    name: str
    packages: tuple[str, ...]


def archives(text: str) -> Iterator[str]:
    """Yield the Debian archives that a sources file names, in its order, without a slash at the end.

    Both formats are read. An archive counts as Debian's own by the last part of its path, as every mirror has it.

    Source: sources.list(5)
    """
    uncommented = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = [uri for match in _URIS.finditer(uncommented) for uri in match[1].split()]
    found += [match[1] for match in _ONE_LINE.finditer(uncommented)]
    for uri in found:
        plain = uri.rstrip("/")
        if plain.startswith(_SCHEMES) and plain.rpartition("/")[2] == "debian":
            yield plain


def archive(sources: Path = SOURCES, environment: Mapping[str, str] = os.environ) -> str:
    """Return the Debian archive to use.

    Reads: /etc/apt/sources.list, /etc/apt/sources.list.d
    Raises: NoArchive.
    """
    if environment.get(VARIABLE):
        return environment[VARIABLE].rstrip("/")
    files = [sources / "sources.list", *sorted((sources / "sources.list.d").glob("*"))]
    for path in files:
        if path.suffix in {".list", ".sources"} and path.is_file():
            for found in archives(path.read_text(errors="replace")):
                return found
    raise NoArchive(
        str(sources),
        "names no Debian archive",
        f"set {VARIABLE} to one, as in a sources.list line of Debian",
    )


def make(
    tree: Tree, target: Path, *, suites: Iterable[str], archive_uri: str, keyring: Path = KEYRING
) -> subprocess.Popen[bytes]:
    """Start to unpack a tree; its output goes to TARGET.log.

    Raises: NoArchive when the keys that sign the archive are not installed.
    """
    if not keyring.is_file():
        raise NoArchive(str(keyring), "does not exist", "run: apt-get install debian-archive-keyring")
    suites = tuple(suites)
    with Path(f"{target}.log").open("wb") as log:
        # In a mount namespace of its own: what mmdebstrap mounts in the tree is gone with it, also when it is killed.
        # No initrd yet: it is made once, when the modules are there.
        return subprocess.Popen(
            [
                *("unshare", "--mount", "--", "mmdebstrap", "--mode=root", "--variant=apt"),
                f"--include={','.join(tree.packages)}",
                '--aptopt=APT::Install-Recommends "false"',
                # A mirror that stands still, as used for repeatable builds, is older than its release file allows.
                '--aptopt=Acquire::Check-Valid-Until "false"',
                *(f"--dpkgopt=path-exclude=/usr/share/{unread}/*" for unread in ("doc", "man", "locale", "info")),
                suites[0],
                str(target),
                *(f"deb [signed-by={keyring}] {archive_uri} {suite} main" for suite in suites),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "INITRD": "No"},
        )


def versions(tree: Path, packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of packages installed in a tree.

    Reads: var/lib/dpkg/status below it
    """
    wanted = {name.partition("/")[0] for name in packages}
    found = {}
    for paragraph in (tree / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"(Package|Version): ", line))
        if fields.get("Package") in wanted:
            found[fields["Package"]] = fields["Version"]
    return found
