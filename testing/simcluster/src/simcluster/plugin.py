# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin's own command as a child process, and the event lines that it writes."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from simcluster.waiting import DEADLINE_S, Changes, on_the_loops_clock

COMMAND: Final = (sys.executable, "-m", "kata_device_plugin")

# A line names up to a thousand devices.
_LINE_LIMIT: Final = 1 << 22
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The directories that the plugin is pointed at."""

    sysfs: Path
    dev_vfio: Path
    device_plugin_dir: Path
    cdi_dir: Path
    cdi_static_dir: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The paths as the command takes them."""
        return (
            f"--sysfs={self.sysfs}",
            f"--dev-vfio={self.dev_vfio}",
            f"--device-plugin-dir={self.device_plugin_dir}",
            f"--cdi-dir={self.cdi_dir}",
            f"--cdi-static-dir={self.cdi_static_dir}",
        )


@dataclass(frozen=True, slots=True)
class Line:
    """One event line. `at_s` is time.monotonic() when it was read, `fields` is the whole of it."""

    at_s: float
    event: str
    fields: Mapping[str, Any]

    def says(self, event: str, **fields: object) -> bool:
        """Whether it is this event, with at least these fields."""
        return self.event == event and all(self.fields.get(key) == value for key, value in fields.items())


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended, negative for a signal, and how long after it was told to."""

    code: int
    seconds: float


class Lines:
    """Event lines in the order in which they were written, and whatever else stood between them."""

    def __init__(self, changes: Changes) -> None:
        self.changes = changes
        self.all: list[Line] = []
        self.stray: list[str] = []

    def take(self, text: str) -> None:
        """Take in one line of standard error."""
        try:
            fields = json.loads(text)
            line = Line(time.monotonic(), fields["event"], fields)
        except (ValueError, KeyError, TypeError):
            self.stray.append(text)
        else:
            self.all.append(line)
        self.changes.tell()

    def having(self, event: str, *, since: int = 0, **fields: object) -> list[Line]:
        """Return the lines of an event with at least these fields, from the `since`-th line on."""
        return [line for line in self.all[since:] if line.says(event, **fields)]

    def events(self, *, since: int = 0) -> list[str]:
        """Return the names of the events, from the `since`-th line on."""
        return [line.event for line in self.all[since:]]

    def mark(self) -> int:
        """Return a position to count from later."""
        return len(self.all)

    async def wait_for(self, event: str, *, since: int = 0, timeout_s: float = DEADLINE_S, **fields: object) -> Line:
        """Return the first line of an event with at least these fields, from the `since`-th line on.

        Raises: NotInTime, with the last lines.
        """
        found = await self.changes.wait_for(
            lambda: self.having(event, since=since, **fields),
            timeout_s=timeout_s,
            what=f"event {event} {fields or ''}".rstrip(),
            state=self.describe,
        )
        return found[0]

    def describe(self) -> str:
        """Return the last lines, one below the other."""
        last = [" ".join(f"{key}={value}" for key, value in line.fields.items()) for line in self.all[-_SHOWN:]]
        return "the plugin's last lines:\n" + "\n".join([*last, *self.stray])

    def check(self) -> None:
        """Fail if anything but event lines was written, a traceback, or what the plugin itself calls a bug.

        Raises: AssertionError.
        """
        traces = [line.fields["traceback"] for line in self.all if "traceback" in line.fields]
        assert not traces, "a traceback in an event line:\n" + "\n".join(traces)
        bugs = [line.fields.get("error") for line in self.having("run.unexpected")]
        assert not bugs, f"the plugin did not expect {bugs}"
        assert not self.stray, "not an event line:\n" + "\n".join(self.stray)


class PluginProcess:
    """A running plugin; made by `run_plugin`."""

    def __init__(self, process: asyncio.subprocess.Process, lines: Lines, started_s: float) -> None:
        self.lines = lines
        self.started_s = started_s
        self._process = process
        self._reader = asyncio.get_running_loop().create_task(self._read())

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def terminate(self, *, timeout_s: float = DEADLINE_S) -> Exit:
        """Tell it to stop, as a node does; return how it ended.

        Raises: AssertionError when it does not end in time; it is killed then.
        """
        return await self._end(signal.SIGTERM, timeout_s)

    async def kill(self) -> Exit:
        """Kill it; nothing of it can be cleaned up by itself."""
        return await self._end(signal.SIGKILL, DEADLINE_S)

    async def wait(self, *, timeout_s: float = DEADLINE_S) -> Exit:
        """Wait until it ends by itself.

        Raises: AssertionError when it does not; it is killed then.
        """
        return await self._end(None, timeout_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def limit_file_size(self, size: int | None) -> None:
        """Let every write that would make a file larger than `size` bytes fail with EFBIG; None lifts the limit.

        A disk that is full, for one process and without privileges. Pipes and sockets are not concerned.

        Source: setrlimit(2), RLIMIT_FSIZE; CPython ignores SIGXFSZ from its start
        """
        _, hard = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def open_files(self) -> tuple[str, ...]:
        """Return what the process has open, as /proc names it."""
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                found.append(str(entry.readlink()))
        return tuple(found)

    async def _end(self, number: signal.Signals | None, timeout_s: float) -> Exit:
        told_s = time.monotonic()
        if number is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)
        try:
            async with asyncio.timeout(on_the_loops_clock(timeout_s)):
                code = await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
            await self._reader
            raise AssertionError(f"the plugin did not end within {timeout_s:g} s; {self.lines.describe()}") from None
        ended_s = time.monotonic()
        await self._reader
        return Exit(code, ended_s - told_s)

    async def _read(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self.lines.take(line.decode(errors="backslashreplace").rstrip("\n"))


@asynccontextmanager
async def run_plugin(
    paths: Paths,
    *,
    command: Sequence[str] = COMMAND,
    environment: Mapping[str, str] | None = None,
    changes: Changes | None = None,
) -> AsyncIterator[PluginProcess]:
    """Run the real command on these paths; at the end it is told to stop, and must not have written a traceback.

    Whoever waits on `changes` is woken by every line.

    Raises: AssertionError, at the end.
    """
    lines = Lines(changes or Changes())
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        *paths.flags,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=None if environment is None else dict(environment),
        limit=_LINE_LIMIT,
    )
    plugin = PluginProcess(process, lines, started_s)
    try:
        yield plugin
    except BaseException as error:
        # What the plugin last said is the first thing to know about a failure.
        if isinstance(error, Exception):
            error.add_note(lines.describe())
        raise
    else:
        if plugin.is_running:
            code = (await plugin.terminate()).code
            assert code == 0, f"the plugin ended with {code}; {lines.describe()}"
        lines.check()
    finally:
        if plugin.is_running:
            await plugin.kill()


async def run_to_end(arguments: Sequence[str], *, timeout_s: float = DEADLINE_S) -> tuple[int, str, Lines]:
    """Run the command with these arguments until it ends; return its exit code, standard output and event lines.

    Raises: AssertionError when it does not end in time.
    """
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(on_the_loops_clock(timeout_s)):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise AssertionError(f"{arguments} did not end within {timeout_s:g} s") from None
    lines = Lines(Changes())
    for line in errors.decode(errors="backslashreplace").splitlines():
        lines.take(line)
    assert process.returncode is not None
    return process.returncode, output.decode(), lines
