# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What is measured: a device plugin's command line, and the place in which it runs.

A peer's command line knows the real paths only, so each subject gets a mount namespace of its own, in which the
simulated node stands at /sys and /dev and the two directories that it writes to stand at theirs. The harness uses the
same directories from outside.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from bench.plugin.board import Board

OURS: Final = "ours"
_STOP_S: Final = 2.0

# Nothing on the machine changes: where a directory does not exist, its parent is hidden behind an empty file system.
# The last line waits for the starter's word, so that what comes before it is not timed.
_ENTER: Final = """
set -e
sysfs=$1 dev=$2 plugins=$3 cdi=$4; shift 4
run=$(readlink -f /var/run)
if [ -d /var/lib/kubelet ]; then kubelet=/var/lib/kubelet; else kubelet=/var/lib; fi
mount -t tmpfs -o size=1m tmpfs "$kubelet"
mkdir -p /var/lib/kubelet/device-plugins
mount --bind "$plugins" /var/lib/kubelet/device-plugins
[ -d "$run/cdi" ] || { mount -t tmpfs -o size=1m tmpfs "$run"; mkdir "$run/cdi"; }
mount --bind "$cdi" "$run/cdi"
if [ -d /etc/cdi ]; then mount -t tmpfs -o size=1m tmpfs /etc/cdi; fi
mount --bind "$sysfs" /sys
mount --bind "$dev" /dev
"""
_START: Final = """
echo ready
read -r _
exec "$@" </dev/null >/dev/null
"""


class NotStarted(Exception):
    """A subject's place could not be made. `observed` is what its shell said."""

    def __init__(self, subject: str, observed: str) -> None:
        super().__init__(subject, observed)
        self.subject = subject
        self.observed = observed

    def __str__(self) -> str:
        return f"{self.subject}: its mount namespace could not be made: {self.observed}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A device plugin: its name in the tables, and its command line."""

    name: str
    command: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read NAME=COMMAND, the command quoted as for a shell.

        Raises: ValueError.
        """
        name, equals, command = text.partition("=")
        words = tuple(shlex.split(command))
        if not equals or not name.strip() or not words:
            raise ValueError(f"{text!r}, expected NAME=COMMAND")
        return cls(name.strip(), words)


class Place:
    """Where one subject runs: the node, and directories of its own that are emptied before every start."""

    def __init__(self, root: Path, board: Board, *, privileged: bool) -> None:
        self.board = board
        self.plugin_dir = root / "p"
        self.cdi_dir = root / "c"
        self.log = root / "log"
        self.kubelet_log = root / "kubelet.log"
        self._privileged = privileged
        # As installed: compiled once, by the first start, which is not counted, and nothing else of Python's switches.
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environment["PYTHONPYCACHEPREFIX"] = str(root.parent / "bytecode")
        self.empty()

    def empty(self) -> None:
        """Make both directories anew."""
        for path in (self.plugin_dir, self.cdi_dir):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)

    def flags(self) -> tuple[str, ...]:
        """Return the path flags of our plugin, for a run outside of a namespace."""
        return (
            f"--sysfs={self.board.sysfs}",
            f"--dev-vfio={self.board.dev_vfio}",
            f"--device-plugin-dir={self.plugin_dir}",
            f"--cdi-dir={self.cdi_dir}",
            f"--cdi-static-dir={self.cdi_dir.parent / 'static'}",
        )

    def prepare(self, subject: Subject) -> Running:
        """Make the place ready for a subject, which then waits for `Running.go`.

        Raises: NotStarted.
        """
        if self._privileged:
            directories = (self.board.sysfs, self.board.dev, self.plugin_dir, self.cdi_dir)
            enter = ("unshare", "--mount", "--propagation", "private", "--")
            argv = (*enter, "sh", "-c", _ENTER + _START, "sh", *map(str, directories), *subject.command)
        else:
            argv = ("sh", "-c", _START, "sh", *subject.command, *self.flags())
        return Running(subject, argv, self._environment, self.log)


class Running:
    """A subject's process, from before its start to its end; a context manager that ends it."""

    def __init__(self, subject: Subject, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.stop()
            raise NotStarted(subject.name, " ".join(log.read_text(errors="replace").split())[-300:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def go(self) -> int:
        """Let the command run; return the moment before (CLOCK_MONOTONIC, ns)."""
        assert self._process.stdin is not None
        at_ns = time.monotonic_ns()
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return at_ns

    def stop(self) -> None:
        """End the process and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()
