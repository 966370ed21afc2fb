# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A child process that is asked with JSON objects, one per line, and answers each with one line."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any, Final, Self

ANSWER_S: Final = 30.0


class Refused(Exception):
    """The program answered with an error. `reason` is a word to branch on, `observed` its text."""

    def __init__(self, program: str, asked: str, reason: str, observed: str) -> None:
        super().__init__(program, asked, reason, observed)
        self.program = program
        self.asked = asked
        self.reason = reason
        self.observed = observed

    def __str__(self) -> str:
        return f"{self.program}: {self.asked} refused, {self.reason}: {self.observed}"


class Gone(Exception):
    """The program ended, or does not answer. `log` is the end of what it wrote to standard error."""

    def __init__(self, program: str, asked: str, observed: str, log: str) -> None:
        super().__init__(program, asked, observed, log)
        self.program = program
        self.asked = asked
        self.observed = observed
        self.log = log

    def __str__(self) -> str:
        return f"{self.program}: no answer to {self.asked}, {self.observed}; its log ends:\n{self.log}"


class JsonLines:
    """The process, from its start to its end; a context manager that kills it."""

    def __init__(self, argv: list[str], *, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, *, within_s: float = ANSWER_S, **parameters: Any) -> Any:
        """Send one request and return its result.

        Raises: Refused, Gone.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"op": op, **parameters}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._gone(op, "it had ended") from error
        answer = json.loads(self._line(op, time.monotonic() + within_s))
        if not answer["ok"]:
            raise Refused(self.name, op, answer.get("reason", ""), answer.get("error", ""))
        return answer.get("result")

    def kill(self) -> None:
        """End it with SIGKILL; nothing is cleaned up."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def _line(self, op: str, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise self._gone(op, "time is up")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._gone(op, f"it ended with {self._process.wait()}")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _gone(self, op: str, observed: str) -> Gone:
        return Gone(self.name, op, observed, "\n".join(self.log.read_text(errors="replace").splitlines()[-15:]))
