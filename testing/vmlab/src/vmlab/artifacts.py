# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Where artifacts are kept: outside the repository, in a folder named after the content of what they are made by."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from vmlab import build as builder
from vmlab.build import Say
from vmlab.errors import NotBuilt

_FILES: Final = ("vmlinuz", "initrd", "disk.raw")
_MANIFEST: Final = "manifest.json"
_KEPT_LOGS: Final = "logs"


def say_to_stderr(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """What a guest is started from. Never written to: a guest's disk is a snapshot."""

    root: Path
    kernel_release: str
    python: str
    """Version of the guest's CPython, "3.13"."""
    packages: Mapping[str, str]
    """Versions of the packages that were named, by name."""

    @property
    def kernel(self) -> Path:
        """The kernel image, as the guest's distribution ships it."""
        return self.root / "vmlinuz"

    @property
    def initrd(self) -> Path:
        """The initial RAM disk, as the guest's distribution makes it."""
        return self.root / "initrd"

    @property
    def disk(self) -> Path:
        """The root file system, raw."""
        return self.root / "disk.raw"

    @property
    def qemu(self) -> Path:
        """The tree that QEMU runs from."""
        return self.root / "qemu"

    @property
    def python_command(self) -> tuple[str, ...]:
        """The start of a command that runs the guest's CPython on this machine, to make byte code for the guest."""
        return tuple(builder.program(self.root / "guest", f"usr/bin/python{self.python}"))

    @property
    def python_environment(self) -> Mapping[str, str]:
        """What that CPython needs to find its standard library."""
        return {"PYTHONHOME": str(self.root / "guest" / "usr")}

    @classmethod
    def open(cls, root: Path) -> Self:
        """Return finished artifacts.

        Raises: NotBuilt when they are not there, or not as they were made.
        """
        try:
            manifest: dict[str, Any] = json.loads((root / _MANIFEST).read_text())
        except FileNotFoundError:
            raise NotBuilt(root, "no artifacts for this recipe") from None
        for name, size in manifest["sizes"].items():
            path = root / name
            observed = path.stat().st_size if path.is_file() else None
            if observed != size:
                raise NotBuilt(root, f"{name} is {observed} bytes, expected {size}")
        return cls(
            root=root,
            kernel_release=manifest["kernel_release"],
            python=manifest["python"],
            packages=manifest["packages"],
        )


def cache() -> Path:
    """Return the folder of all artifacts."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kata-devices" / "lab"


def key() -> str:
    """Digest of everything in the repository that decides the artifacts."""
    digest = hashlib.sha256()
    package = Path(builder.__file__).parent
    for path in builder.inputs():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:16]


def current() -> Path:
    """Return the folder of the artifacts of this checkout, there or not."""
    return cache() / key()


def find() -> Artifacts:
    """Return the artifacts of this checkout.

    Raises: NotBuilt.
    """
    return Artifacts.open(current())


def ensure(say: Say = say_to_stderr, *, anew: bool = False) -> Artifacts:
    """Return the artifacts of this checkout, made first when they are not there.

    Raises: MissingTools, NoArchive, BuildFailed.
    """
    target = current()
    cache().mkdir(parents=True, exist_ok=True)
    with _locked(cache() / "lock"):
        if not anew:
            try:
                return Artifacts.open(target)
            except NotBuilt:
                pass
        _remove(target)
        say(f"making the lab's artifacts in {target}; this takes about two minutes")
        # The lock is held, so a folder of this kind is what a build that was killed has left.
        for leftover in cache().glob(".building-*"):
            _remove(leftover)
        temporary = cache() / f".building-{target.name}"
        temporary.mkdir(mode=0o755)
        made = builder.build(temporary, say)
        logs = temporary / _KEPT_LOGS
        logs.mkdir()
        for log in temporary.glob("*.log"):
            log.rename(logs / log.name)
        sizes = {name: (temporary / name).stat().st_size for name in _FILES}
        (temporary / _MANIFEST).write_text(json.dumps({**asdict(made), "sizes": sizes}, indent=2) + "\n")
        temporary.rename(target)
    return Artifacts.open(target)


def prune() -> tuple[Path, ...]:
    """Remove the artifacts of other checkouts and older recipes; return what was removed."""
    kept = current()
    with _locked(cache() / "lock"):
        old = [path for path in sorted(cache().iterdir()) if path.is_dir() and path != kept]
        for path in old:
            _remove(path)
    return tuple(old)


def _remove(path: Path) -> None:
    if path.exists():
        # Not shutil.rmtree: a build that was killed may have left a mount in there, and beyond it is this machine.
        subprocess.run(["rm", "-rf", "--one-file-system", str(path)], check=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
