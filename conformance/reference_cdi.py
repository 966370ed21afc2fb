# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The reference CDI library, one release of it, in a child process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from conformance.json_lines import JsonLines


@dataclass(frozen=True, slots=True)
class DeviceNode:
    """A device node that injection adds to a container, and what its cgroup rule allows."""

    path: str
    type: str
    major: int
    minor: int
    permissions: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a refresh says: `error` is what the caller sees, `files` and `dirs` hold the reasons by path."""

    error: str
    files: Mapping[str, tuple[str, ...]]
    dirs: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Hammered:
    """What a consumer that never rests saw: rounds, what was wrong with files, failed injections, unknown names."""

    rounds: int
    wrong: tuple[str, ...]
    failed: tuple[str, ...]
    missing: int


class CdiLibrary:
    """A process with one release; `open` says which directories."""

    def __init__(self, binary: Path, log: Path, *, release: str) -> None:
        self.release = release
        self._process = JsonLines([str(binary)], name=f"CDI library {release}", log=log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def open(self, dirs: Iterable[Path], *, watch: bool = False) -> None:
        """Read these directories, the last with the highest priority; `watch` follows changes as a daemon does.

        Raises: Refused when a file makes the library panic.
        """
        self._process.ask("open", dirs=[str(path) for path in dirs], watch=watch)

    def refresh(self) -> Findings:
        """Read the directories again, as Kata does for each sandbox."""
        answer = self._process.ask("refresh")
        files = {path: tuple(reasons) for path, reasons in answer["files"].items()}
        return Findings(answer["error"], files, answer["dirs"])

    def devices(self) -> tuple[str, ...]:
        """Return every name that can be resolved."""
        return tuple(self._process.ask("devices"))

    def inject(self, *names: str) -> tuple[DeviceNode, ...]:
        """Return the device nodes that a container with these devices gets.

        Raises: Refused when a name is unknown or a node is not there.
        """
        return tuple(DeviceNode(**node) for node in self._process.ask("inject", devices=list(names)))

    def hammer(self, names: Iterable[str], *, for_ms: int) -> Hammered:
        """Refresh and inject as fast as possible for so long."""
        answer = self._process.ask("hammer", devices=list(names), ms=for_ms, within_s=for_ms / 1000 + 10)
        return Hammered(answer["rounds"], tuple(answer["wrong"]), tuple(answer["failed"]), answer["missing"])

    def version(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._process.ask("version")
        return answer
