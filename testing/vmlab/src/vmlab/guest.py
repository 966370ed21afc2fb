# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A running guest: commands with exit code and output, files in and out, processes to talk to, reboots."""

from __future__ import annotations

import base64
import queue
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from vmlab import build
from vmlab.artifacts import Artifacts
from vmlab.device import PciFunction
from vmlab.errors import CommandFailed, GuestGone, GuestSilent, LabError, MissingTools
from vmlab.link import Answer, Link
from vmlab.machine import Iommu, Machine, address
from vmlab.vfio_user import Server
from vmlab.waiting import holds_within

PAYLOAD: Final = "/payload"
"""Where a guest's payload is mounted."""

BOOT_S: Final = 400.0
"""A boot takes 20 to 40 s on two idle cores, and several times that on busy ones."""
_ANSWER_S: Final = 60.0
_CONSOLE_LINES: Final = 40
_TOOLS: Final = {"setpriv": "util-linux", "mke2fs": "e2fsprogs"}

Command = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that was run. `exit_code` is None when it was killed because its time was up."""

    command: Command
    exit_code: int | None
    stdout: str
    stderr: str


class Process:
    """A process that runs in the guest beside the test."""

    def __init__(self, guest: Guest, pid: int, stderr: str) -> None:
        self._guest = guest
        self.pid = pid
        self.stderr = stderr
        """Path in the guest of what it writes to standard error, and to standard output unless it is talked to."""

    def exchange(self, line: str, *, within_s: float = _ANSWER_S) -> str:
        """Send a line to its standard input and return the next line of its standard output.

        Raises: GuestSilent, LabError when its output ends.
        """
        return self.exchanged(self.exchange_later(line), line, within_s=within_s)

    def exchange_later(self, line: str) -> Future[Answer]:
        """Send a line, and do something else meanwhile. Only one line may be on its way at a time."""
        return self._guest.link.ask("exchange", pid=self.pid, line=line)

    def exchanged(self, answer: Future[Answer], line: str, *, within_s: float) -> str:
        """Return the line that came for `exchange_later`.

        Raises: GuestSilent, LabError when its output ends.
        """
        return str(self._guest.answer(answer, line, within_s)["line"])

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it ended and was waited for."""
        self._guest.ask("signal", pid=self.pid, signal=int(number))

    def wait(self, *, within_s: float = 10.0) -> int | None:
        """Return its exit status, or None when it still runs after that time."""
        code = self._guest.ask("wait", within_s=within_s + _ANSWER_S, pid=self.pid, timeout_s=within_s)["exit_code"]
        return None if code is None else int(code)


class Guest:
    """A guest from its boot to its end. A context manager; nothing that it changes outlives it.

    `functions` are behind root ports in this order, see `address_of`. `payload` is a folder that the guest finds, read
    only, at /payload. `device_nodes=False` takes the kernel's vfio modules as the distribution ships them, without
    per-device nodes.
    """

    def __init__(
        self,
        artifacts: Artifacts,
        *,
        functions: Sequence[PciFunction] = (),
        iommu: Iommu = Iommu.INTEL,
        payload: Path | None = None,
        device_nodes: bool = True,
        blacklist: Sequence[str] = (),
    ) -> None:
        self.functions = tuple(functions)
        self._artifacts = artifacts
        self._iommu = iommu
        self._payload = payload
        self._device_nodes = device_nodes
        self._blacklist = tuple(blacklist)
        self._stack = ExitStack()
        self._boot = ""
        self._processes = 0
        self.boot_s = 0.0
        """How long the last boot took, from the start of the machine or the reboot's command."""

    def __enter__(self) -> Self:
        missing = build.missing_tools(_TOOLS)
        if missing:
            raise MissingTools(missing)
        with ExitStack() as stack:
            self._start(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def address_of(self, function: PciFunction) -> str:
        """Return a function's PCI address in the guest."""
        return address(self.functions.index(function))

    # Commands.

    def run(self, command: Command, *, within_s: float = 60.0, env: Mapping[str, str] | None = None) -> Completed:
        """Run a command to its end: a list as it is, a string through bash.

        Raises: GuestSilent, GuestGone.
        """
        answer = self.ask(
            "run", within_s=within_s + _ANSWER_S, argv=_argv(command), env=dict(env or {}), timeout_s=within_s
        )
        return Completed(command, answer["exit_code"], answer["stdout"], answer["stderr"])

    def check(self, command: Command, *, within_s: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """Run a command and return what it wrote to standard output.

        Raises: CommandFailed when its exit code is not 0, GuestSilent, GuestGone.
        """
        done = self.run(command, within_s=within_s, env=env)
        if done.exit_code != 0:
            raise CommandFailed(command, done.exit_code, done.stdout, done.stderr)
        return done.stdout

    def start(self, command: Command, *, talks: bool = False, env: Mapping[str, str] | None = None) -> Process:
        """Start a process and return at once. It ends with the guest, if not before.

        `talks` connects its standard input and output to `Process.exchange`.
        """
        self._processes += 1
        stderr = f"/run/process-{self._processes}.log"
        started = self.ask("start", argv=_argv(command), env=dict(env or {}), stderr=stderr, talks=talks)
        return Process(self, int(started["pid"]), stderr)

    # Files.

    def put(self, path: str, content: str | bytes, *, mode: int = 0o644) -> None:
        """Write a file in the guest, and the folders above it."""
        data = content.encode() if isinstance(content, str) else content
        self.ask("put", path=path, content=base64.b64encode(data).decode(), mode=mode)

    def get(self, path: str) -> bytes:
        """Return the content of a file in the guest.

        Raises: LabError when it can't be read.
        """
        return base64.b64decode(self.ask("get", path=path)["content"])

    # Life.

    def reboot(self) -> None:
        """Restart the guest's system, and return when its agent is back. Its disk keeps what was written."""
        started_s = time.monotonic()
        self.check("sync")
        self.link.ask("run", argv=["systemctl", "reboot"], env={}, timeout_s=60)
        self._wait_for_boot(started_s)

    def ask(self, operation: str, *, within_s: float = _ANSWER_S, **parameters: object) -> Answer:
        """Send a request to the agent and return its answer.

        Raises: GuestSilent, GuestGone, LabError when the agent could not do it.
        """
        return self.answer(self.link.ask(operation, **parameters), operation, within_s)

    def answer(self, future: Future[Answer], asked: str, within_s: float) -> Answer:
        """Return the answer to a request that was sent; raises as `ask` does."""
        try:
            answer = future.result(within_s)
        except TimeoutError:
            raise GuestSilent(asked, within_s, console=self.console()) from None
        except ConnectionError as error:
            raise self._gone(str(error)) from error
        if "error" in answer:
            raise LabError(f"guest: {asked}: {answer['error']}")
        return answer

    def console(self) -> str:
        """Return the end of the serial console."""
        return _end_of(self._machine.console)

    def _start(self, stack: ExitStack) -> None:
        started_s = time.monotonic()
        # A short path, whatever TMPDIR is: it holds sockets.
        folder = Path(tempfile.mkdtemp(prefix="vmlab-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        image = None
        if self._payload is not None:
            image = folder / "payload.raw"
            _make_payload(self._payload, image)
        arguments = tuple(f"modprobe.blacklist={module}" for module in self._blacklist)
        self._machine = Machine(
            artifacts=self._artifacts,
            folder=folder,
            functions=tuple(function.name for function in self.functions),
            iommu=self._iommu,
            payload=image,
            kernel_arguments=arguments,
        )
        self._servers = [
            stack.enter_context(Server(function, self._machine.function_socket(function.name)))
            for function in self.functions
        ]
        self._process = self._machine.start()
        stack.callback(_end, self._process)
        self.link = self._connect()
        stack.callback(self.link.close)
        self._wait_for_boot(started_s)

    def _connect(self) -> Link:
        connected: list[Link] = []

        def tried() -> bool:
            with suppress(OSError):
                connected.append(Link(self._machine.agent_socket))
            return bool(connected) or self._process.poll() is not None

        if not holds_within(tried, 60.0):
            raise GuestSilent("connecting", 60.0)
        if not connected:
            raise self._gone(f"QEMU ended with {self._process.returncode}")
        return connected[0]

    def _wait_for_boot(self, started_s: float) -> None:
        deadline_s = started_s + BOOT_S
        while True:
            try:
                hello = self.link.hellos.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise GuestSilent("boot", BOOT_S, console=self.console()) from None
            if hello is None:
                raise self._gone("QEMU ended while the guest started")
            if hello["boot"] != self._boot:
                break
        self._boot = hello["boot"]
        self.link.forget("the guest was restarted")
        self.boot_s = time.monotonic() - started_s
        if self._payload is not None:
            self.check(f"mkdir -p {PAYLOAD} && mount -o ro LABEL=payload {PAYLOAD}")
        if not self._device_nodes:
            modules = f"/lib/modules/{self._artifacts.kernel_release}"
            self.check(f"cp {modules}/{build.STOCK_INDEX}/* {modules}/")

    def _gone(self, observed: str) -> GuestGone:
        problems = [f"{server.function.name}: {problem}" for server in self._servers for problem in server.problems]
        output = "\n".join([_end_of(self._machine.output), *problems])
        return GuestGone(observed, console=self.console(), output=output)


def _argv(command: Command) -> list[str]:
    return ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)


def _end(process: subprocess.Popen[bytes]) -> None:
    # Nothing is lost: the disk is a snapshot.
    process.kill()
    process.wait()


def _end_of(path: Path) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-_CONSOLE_LINES:])


def _make_payload(folder: Path, image: Path) -> None:
    """Make a disk image that holds a folder's content."""
    content = sum(path.lstat().st_size + 8192 for path in folder.rglob("*"))
    with image.open("wb") as file:
        file.truncate(content + content // 4 + (16 << 20))
    build.ext4_from(folder, image, label="payload", log=image.with_suffix(".log"))
