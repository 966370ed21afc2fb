# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The plugin's loop in the test's own process: for what a child process can't be given, a clock or a kernel that says no."""

from __future__ import annotations

import asyncio
import errno
import io
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from eventline import EventLog
from kata_device_plugin.daemon import Daemon, Settings
from kata_device_plugin.watch import DirectoryWatch, Names, Unavailable
from simcluster.plugin import Lines, Paths
from simcluster.waiting import Changes

Watcher = Callable[[Iterable[str]], DirectoryWatch]


@dataclass(frozen=True, slots=True)
class InProcess:
    """A running instance: what it wrote, and how to end it."""

    lines: Lines
    task: asyncio.Task[None]
    daemon: Daemon

    async def stop(self) -> None:
        """Stop it as SIGTERM does."""
        self.daemon.stop()
        await self.task


@asynccontextmanager
async def run_in_process(paths: Paths, changes: Changes, watcher: Watcher) -> AsyncIterator[InProcess]:
    """Run the plugin's loop as a task, and end it."""
    lines = Lines(changes)
    settings = Settings(
        sysfs=str(paths.sysfs),
        dev_vfio=str(paths.dev_vfio),
        device_plugin_dir=str(paths.device_plugin_dir),
        cdi_dir=str(paths.cdi_dir),
        cdi_static_dir=str(paths.cdi_static_dir),
    )
    daemon = Daemon(settings, EventLog("kata-device-plugin", "0", stream=_Taker(lines)), watcher=watcher)
    task = asyncio.get_running_loop().create_task(daemon.run())
    try:
        yield InProcess(lines, task, daemon)
    except Exception as error:
        error.add_note(lines.describe())
        raise
    finally:
        daemon.stop()
        await task
    lines.check()


class _Taker(io.StringIO):
    """Hands each line to whoever collects them."""

    def __init__(self, lines: Lines) -> None:
        super().__init__()
        self._lines = lines

    def write(self, text: str) -> int:
        self._lines.take(text.rstrip("\n"))
        return len(text)


class Kernel:
    """What the kernel says to who asks for directory events; hand `watch` to the plugin."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.asked = 0
        self._breaking: list[_Breakable] = []

    def watch(self, directories: Iterable[str]) -> DirectoryWatch:
        """Answer as the kernel does: with a watch, or with EMFILE."""
        self.asked += 1
        if self.refuses:
            raise Unavailable(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        watch = _Breakable(directories)
        self._breaking.append(watch)
        return watch

    def lose(self) -> None:
        """Refuse from now on, and at the next event of those watches that there are."""
        self.refuses = True
        for watch in self._breaking:
            watch.is_broken = True


class _Breakable(DirectoryWatch):
    is_broken = False

    def read(self) -> Mapping[str, Names]:
        if self.is_broken:
            raise Unavailable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return super().read()


class DeafWatch(DirectoryWatch):
    """A watch that the kernel grants and never tells anything, as on some network and overlay file systems."""

    def __init__(self, directories: Iterable[str]) -> None:
        super().__init__(directories)
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
        super().close()
