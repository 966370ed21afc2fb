# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A running guest, as a context manager: commands with exit codes, files, programs that stay, reboots.

Deadlines are generous: on a busy machine a boot under emulation takes minutes instead of twenty seconds. Nothing here
sleeps for a fixed time.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from vmlab.artifacts import Artifacts
from vmlab.device import Function
from vmlab.errors import CommandFailed, GuestGone, GuestSilent, LabError
from vmlab.machine import Machine, start_qemu
from vmlab.vfio_user import Server

BOOT_S: Final = 420.0
COMMAND_S: Final = 120.0
_GRACE_S: Final = 30.0
_POLL_S: Final = 0.05
_LOG_LINES: Final = 25
PAYLOAD: Final = "/payload"


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that ran to its end in the guest."""

    command: str
    exit_code: int
    out: str
    err: str
    seconds: float


class AgentRefused(LabError):
    """The agent could not do what was asked; `observed` is its reason."""

    def __init__(self, asked: str, observed: str) -> None:
        super().__init__(asked, observed)
        self.asked = asked
        self.observed = observed

    def __str__(self) -> str:
        return f"in the guest, {self.asked}: {self.observed}"


class Program:
    """A program that stays in the guest, driven by lines; its standard error is a file there."""

    def __init__(self, guest: Guest, name: str, pid: int, log: str) -> None:
        self._guest = guest
        self.name = name
        self.pid = pid
        self.log = log

    def tell(self, line: str) -> None:
        """Write a line to it."""
        self._guest.ask("tell", name=self.name, line=line)

    def hear(self, *, within_s: float = COMMAND_S) -> str:
        """Return its next line.

        Raises: AgentRefused when it ends or says nothing in time, with the end of its standard error.
        """
        answer = self._guest.ask("hear", name=self.name, within_s=within_s, deadline_s=within_s)
        if answer["line"] is None:
            log = "\n".join(self.errors().splitlines()[-_LOG_LINES:])
            raise AgentRefused(f"{self.name}: no line", f"{answer['why']}; its log ends:\n{log}")
        return str(answer["line"])

    def errors(self) -> str:
        """Return what it wrote to standard error so far."""
        return self._guest.get(self.log).decode(errors="replace")

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return bool(self._guest.ask("running", name=self.name)["running"])

    def end(self, signal: str = "SIGTERM", *, within_s: float = COMMAND_S) -> int:
        """Send a signal and return the exit status, negative for a signal.

        Raises: AgentRefused when it goes on.
        """
        status = self._guest.ask("end", name=self.name, signal=signal, within_s=within_s, deadline_s=within_s)["status"]
        if status is None:
            raise AgentRefused(f"{self.name}: {signal}", f"still running after {within_s:g} s")
        return int(status)


class Guest:
    """A guest from boot to the end of the `with` block; `functions` are what its devices hold."""

    def __init__(self, artifacts: Artifacts, machine: Machine) -> None:
        self.artifacts = artifacts
        self.machine = machine
        self.functions = {name: Function.of(identity) for name, identity in machine.functions.items()}
        self.boot_s = 0.0
        """How long the last boot took until the agent answered."""
        self.kernel_release = ""
        self._stack = ExitStack()
        self._asked = 0
        self._unread = b""
        # Set in __enter__, in this order.
        self.folder: Path
        self._qemu: subprocess.Popen[bytes]
        self._agent: socket.socket

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            # A Unix socket's path may have 107 bytes: a short folder, whatever the test's own is called.
            self.folder = Path(tempfile.mkdtemp(prefix="vmlab-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for name, function in self.functions.items():
                stack.enter_context(Server(function, self.folder / f"{name}.sock"))
            started_s = time.monotonic()
            self._qemu = start_qemu(self.machine, self.artifacts, self.folder)
            stack.callback(self._kill)
            self._agent = stack.enter_context(self._connected(started_s + BOOT_S))
            self._await_hello(started_s)
            if self.machine.payload:
                self.run(f"mount -o ro /dev/vdb {PAYLOAD}")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # Commands and files.

    def run(self, command: str, *, check: bool = True, within_s: float = COMMAND_S) -> Ended:
        """Run a shell command to its end.

        Raises: CommandFailed for a status other than 0, unless `check` is off; AgentRefused when time is up.
        """
        answer = self.ask("run", command=command, within_s=within_s, deadline_s=within_s)
        ended = Ended(command, answer["status"], answer["out"], answer["err"], answer["seconds"])
        if check and ended.exit_code != 0:
            raise CommandFailed(command, ended.exit_code, ended.out, ended.err)
        return ended

    def put(self, path: str, data: bytes | str, *, mode: int = 0o644) -> None:
        """Write a file in the guest, with its folders. For megabytes use the machine's payload."""
        raw = data.encode() if isinstance(data, str) else data
        self.ask("put", path=path, mode=mode, data=base64.b64encode(raw).decode())

    def get(self, path: str) -> bytes:
        """Read a file of the guest.

        Raises: AgentRefused.
        """
        return base64.b64decode(self.ask("get", path=path)["data"])

    def spawn(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Program:
        """Start a program that stays; its standard error goes to /run/<name>.log."""
        log = f"/run/{name}.log"
        answer = self.ask("spawn", name=name, argv=list(argv), env=dict(env or {}), stderr=log)
        return Program(self, name, answer["pid"], log)

    def reboot(self) -> None:
        """Reboot from inside, as an administrator would, and wait for the agent; programs are gone."""
        started_s = time.monotonic()
        self._send({"id": 0, "op": "run", "command": "sync; systemctl reboot", "within_s": COMMAND_S})
        self._await_hello(started_s)
        if self.machine.payload:
            self.run(f"mount -o ro /dev/vdb {PAYLOAD}")

    def console(self) -> str:
        """Return what the guest wrote to its console."""
        path = self.folder / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    # The conversation.

    def ask(self, op: str, *, deadline_s: float = COMMAND_S, **parameters: Any) -> dict[str, Any]:
        """Ask the agent for one thing.

        Raises: AgentRefused, GuestGone.
        """
        self._asked += 1
        self._send({"id": self._asked, "op": op, **parameters})
        until_s = time.monotonic() + deadline_s + _GRACE_S
        while True:
            answer = self._receive(until_s)
            if "hello" in answer:
                raise self._lost("the agent started anew: the guest rebooted, or the agent failed")
            if answer.get("id") == self._asked:
                break
        if not answer["ok"]:
            raise AgentRefused(
                f"{op} {parameters.get('name') or parameters.get('path') or ''}".strip(), answer["error"]
            )
        return answer

    def _send(self, message: Mapping[str, Any]) -> None:
        self._agent.settimeout(COMMAND_S)
        try:
            self._agent.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise self._lost(f"the agent's socket: {error}") from error

    def _receive(self, until_s: float) -> dict[str, Any]:
        while b"\n" not in self._unread:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise GuestSilent("the last request", COMMAND_S, console=_tail(self.console()))
            self._agent.settimeout(left_s)
            try:
                data = self._agent.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._lost(f"the agent's socket: {error}") from error
            if not data:
                raise self._lost("QEMU closed the agent's socket")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _await_hello(self, started_s: float) -> None:
        while True:
            message = self._receive(started_s + BOOT_S)
            if "hello" in message:
                self.boot_s = time.monotonic() - started_s
                self.kernel_release = message["hello"]
                return

    def _connected(self, until_s: float) -> socket.socket:
        agent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        while True:
            try:
                agent.connect(str(self.folder / "agent.sock"))
            except OSError:
                if self._qemu.poll() is not None or time.monotonic() > until_s:
                    agent.close()
                    raise self._lost("it does not offer the agent's socket") from None
                time.sleep(_POLL_S)
            else:
                return agent

    def _lost(self, observed: str) -> GuestGone:
        status = self._qemu.poll()
        state = "QEMU runs" if status is None else f"QEMU ended with {status}"
        log = self.folder / "qemu.log"
        return GuestGone(
            f"{observed} ({state})", console=_tail(self.console()), output=_tail(log.read_text(errors="replace"))
        )

    def _kill(self) -> None:
        self._qemu.kill()
        self._qemu.wait()


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-_LOG_LINES:])
