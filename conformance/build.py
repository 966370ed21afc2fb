# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Build the Go programs of the conformance suite, once, into a cache outside the repository.

`python conformance/build.py` builds all of them, `python conformance/build.py NAME...` some; each line printed is the
path of a program. A program is built anew when its sources, its go.mod, its go.sum or the Go version changes.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Program:
    """A Go program: the folder of its module, and the folder of the module that it shares with its siblings."""

    name: str
    folder: str
    shared: str


PROGRAMS: Final = {
    program.name: program
    for program in (
        Program("kubelet-1.34", "kubelet/v1_34", "kubelet/devicenode"),
        Program("kubelet-1.37", "kubelet/v1_37", "kubelet/devicenode"),
        Program("cdi-0.6", "cdi/v0_6", "cdi/resolver"),
        Program("cdi-1.1", "cdi/v1_1", "cdi/resolver"),
    )
}

# Static, so that the same file runs in a guest; -s -w halves the size and the link time.
_FLAGS: Final = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags=-s -w")
_ENVIRONMENT: Final = {"CGO_ENABLED": "0", "GOWORK": "off", "GOFLAGS": ""}


class BuildFailed(Exception):
    """A program could not be built. `program`, `observed` and `hint` say what happened and what to do."""

    def __init__(self, program: str, observed: str, hint: str) -> None:
        super().__init__(program, observed, hint)
        self.program = program
        self.observed = observed
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.program}: not built, {self.observed}; {self.hint}"


def cache_dir() -> Path:
    """Return where built programs are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kata-devices" / "conformance"


def sources(program: Program) -> tuple[Path, ...]:
    """Return the files that decide what the program is, in a fixed order."""
    folders = (HERE / program.shared, HERE / program.folder)
    return tuple(
        sorted(path for folder in folders for path in folder.iterdir() if path.suffix in {".go", ".mod", ".sum"})
    )


def ensure(name: str) -> Path:
    """Return the path of a program, building it first when the cache does not have it.

    Raises: BuildFailed.
    """
    program = PROGRAMS[name]
    go = shutil.which("go")
    if go is None:
        raise BuildFailed(name, "there is no `go` in PATH", "install Go 1.26 or newer and run `make conformance` again")
    built = cache_dir() / f"{name}-{_key(program, go)}"
    if built.exists():
        return built
    built.parent.mkdir(parents=True, exist_ok=True)
    with _locked(built.parent / f"{name}.lock"):
        if not built.exists():
            _build(program, go, built)
    return built


def _key(program: Program, go: str) -> str:
    """Digest of everything that decides the result."""
    digest = hashlib.sha256()
    for text in (*_FLAGS, _go(program.name, go, "env", "GOVERSION", "GOOS", "GOARCH", "GOAMD64", "GOARM64")):
        digest.update(f"{text}\0".encode())
    for path in sources(program):
        digest.update(f"{path.relative_to(HERE)}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _build(program: Program, go: str, built: Path) -> None:
    print(f"building {program.name}; the first time this takes minutes", file=sys.stderr, flush=True)
    started_s = time.monotonic()
    temporary = built.with_name(f".{built.name}.{os.getpid()}")
    try:
        _go(program.name, go, "build", *_FLAGS, "-o", str(temporary), ".", folder=HERE / program.folder)
        temporary.replace(built)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"built {program.name} in {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)


def _go(name: str, go: str, *arguments: str, folder: Path = HERE) -> str:
    ended = subprocess.run(
        [go, *arguments], cwd=folder, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        observed = "\n".join(ended.stderr.strip().splitlines()[-20:])
        raise BuildFailed(
            name,
            f"`go {arguments[0]}` ended with {ended.returncode}:\n{observed}\n",
            "Go 1.26 or newer and a Go module proxy are needed",
        )
    return ended.stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: list[str] | None = None) -> int:
    """Build what the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description="Build the Go programs of the conformance suite.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(PROGRAMS)}; all when absent")
    names = parser.parse_args(arguments).names or list(PROGRAMS)
    unknown = sorted(set(names) - PROGRAMS.keys())
    if unknown:
        parser.error(f"no program {unknown[0]}, expected one of {', '.join(PROGRAMS)}")
    try:
        for name in names:
            print(ensure(name), flush=True)
    except BuildFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
