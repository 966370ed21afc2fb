# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What can go wrong in the lab.

LabError
├── MissingTools       a program that the lab needs is not installed
├── NoArchive          it is not known where Debian packages come from
├── BuildFailed        a step of the artifact build ended badly
├── NotBuilt           there are no artifacts for these build inputs
├── GuestGone          the machine ended, or never came up
├── GuestSilent        the machine runs and did not answer in time
└── CommandFailed      a command in the guest ended with another status than 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


class LabError(Exception):
    """Anything of the lab. The message is made from the attributes."""


class MissingTools(LabError):
    """Programs are not installed. `packages` maps each to the Debian package that has it."""

    def __init__(self, packages: Mapping[str, str]) -> None:
        super().__init__(packages)
        self.packages = dict(packages)

    def __str__(self) -> str:
        names = " ".join(sorted(set(self.packages.values())))
        return f"{', '.join(sorted(self.packages))}: not installed; run: apt-get install {names}"


class NoArchive(LabError):
    """No source of Debian packages. `observed` says where it was looked for."""

    def __init__(self, subject: str, observed: str, hint: str) -> None:
        super().__init__(subject, observed, hint)
        self.subject = subject
        self.observed = observed
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.subject}: {self.observed}; {self.hint}"


class BuildFailed(LabError):
    """A build step ended badly. `tail` is the end of what it wrote to `log`."""

    def __init__(self, step: str, observed: str, log: Path | None = None, tail: str = "") -> None:
        super().__init__(step, observed, log, tail)
        self.step = step
        self.observed = observed
        self.log = log
        self.tail = tail

    def __str__(self) -> str:
        where = f"; its output is in {self.log}, and ends with:\n{self.tail}" if self.log else ""
        return f"{self.step}: {self.observed}{where}"


class NotBuilt(LabError):
    """There are no artifacts at `path`."""

    def __init__(self, path: Path, observed: str) -> None:
        super().__init__(path, observed)
        self.path = path
        self.observed = observed

    def __str__(self) -> str:
        return f"{self.path}: {self.observed}; run: python -m vmlab build"


class GuestGone(LabError):
    """The machine is not there any more. `console` is the end of its serial console, `output` of QEMU's own."""

    def __init__(self, observed: str, *, console: str, output: str) -> None:
        super().__init__(observed, console, output)
        self.observed = observed
        self.console = console
        self.output = output

    def __str__(self) -> str:
        return f"guest: {self.observed}\n--- QEMU wrote ---\n{self.output}\n--- console ---\n{self.console}"


class GuestSilent(LabError):
    """No answer within `waited_s` to `asked`."""

    def __init__(self, asked: str, waited_s: float, *, console: str = "") -> None:
        super().__init__(asked, waited_s, console)
        self.asked = asked
        self.waited_s = waited_s
        self.console = console

    def __str__(self) -> str:
        return f"guest: no answer to {self.asked} within {self.waited_s:g} s\n--- console ---\n{self.console}"


class CommandFailed(LabError):
    """A command in the guest did not succeed."""

    def __init__(self, command: str | Sequence[str], exit_code: int | None, stdout: str, stderr: str) -> None:
        super().__init__(command, exit_code, stdout, stderr)
        self.command = command
        self.exit_code = exit_code
        self.stdout = stdout
        self.stderr = stderr

    def __str__(self) -> str:
        ended = "did not end in time" if self.exit_code is None else f"ended with {self.exit_code}"
        return f"in the guest, {self.command!r}: {ended}, expected 0\n{self.stdout}{self.stderr}"
