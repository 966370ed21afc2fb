# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Tells which directories changed, by inotify, also for directories that do not exist yet.

Never a single file: a watch on a file dies with it. Each directory is watched together with its parent, so that its
removal and return are seen; where the parent is missing too, the nearest one that exists is watched until it appears.

Source: inotify(7); observed on Linux 7.3: /dev/vfio/devices comes with the first device node, which is already in it
when its own creation is reported, and goes with the last.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from typing import Final

from kata_device_plugin import inotify
from kata_device_plugin.inotify import Inotify

_PARENT_MASK: Final = (
    inotify.CREATE
    | inotify.DELETE
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.DELETE_SELF
    | inotify.MOVE_SELF
    | inotify.ONLYDIR
    | inotify.MASK_ADD
)
_TARGET_MASK: Final = _PARENT_MASK | inotify.ATTRIB | inotify.CLOSE_WRITE
_SELF: Final = inotify.DELETE_SELF | inotify.MOVE_SELF | inotify.IGNORED | inotify.UNMOUNT

# No inode: a directory that went is not the same again, although a new one may be given its number.
_REPLACED: Final = (-1, -1)

Names = frozenset[str] | None
"""Entries that changed in a directory; None when the directory itself came, went or was replaced."""


class Unavailable(Exception):
    """The kernel gives no inotify instance or no watch."""

    def __init__(self, error: OSError) -> None:
        """Name the limit that is the likely cause."""
        limit = {errno.EMFILE: "fs.inotify.max_user_instances", errno.ENOSPC: "fs.inotify.max_user_watches"}
        cause = f" ({limit[error.errno]})" if error.errno in limit else ""
        super().__init__(f"{os.strerror(error.errno or 0)}{cause}")


class DirectoryWatch:
    """One inotify instance for a fixed set of directories. Its descriptor is readable when there is something to read."""

    def __init__(self, directories: Iterable[str]) -> None:
        """Start to watch.

        Raises: Unavailable.
        """
        self._targets = tuple(dict.fromkeys(map(os.path.normpath, directories)))
        self._paths: dict[int, str] = {}
        self._on_the_way: set[str] = set()
        self._inodes: dict[str, tuple[int, int] | None] = {}
        try:
            self._inotify = Inotify()
        except OSError as error:
            raise Unavailable(error) from error
        try:
            self._arm()
        except Unavailable:
            self._inotify.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to wait on."""
        return self._inotify.fileno()

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

    def read(self) -> Mapping[str, Names]:
        """Return what changed since the last call, by directory; empty when nothing did.

        Raises: Unavailable when a directory that came back can't be watched.
        """
        names: dict[str, set[str]] = {}
        moved = False
        for event in self._inotify.read():
            if event.mask & inotify.Q_OVERFLOW:
                self._arm()
                return dict.fromkeys(self._targets)
            path = self._paths.get(event.watch)
            if event.mask & _SELF:
                moved = True
                if path in self._inodes:
                    self._inodes[path] = _REPLACED
                if event.mask & inotify.IGNORED:
                    self._paths.pop(event.watch, None)
            elif path is not None:
                names.setdefault(path, set()).add(event.name)
                moved = moved or os.path.join(path, event.name) in self._on_the_way
        changes: dict[str, Names] = {target: frozenset(names[target]) for target in self._targets if target in names}
        if moved:
            changes.update(dict.fromkeys(self._arm()))
        return changes

    def _arm(self) -> frozenset[str]:
        """Watch what exists now; return the targets that are not the directories that they were."""
        renewed = set()
        self._on_the_way.clear()
        for target in self._targets:
            inode = self._arm_one(target)
            if inode != self._inodes.get(target):
                renewed.add(target)
            self._inodes[target] = inode
        return frozenset(renewed)

    def _arm_one(self, target: str) -> tuple[int, int] | None:
        while True:
            inode = self._add(target, _TARGET_MASK)
            path = target
            missing = ""
            while path not in ("/", ""):
                self._on_the_way.add(path)
                missing, path = path, os.path.dirname(path)
                if self._add(path or ".", _PARENT_MASK) is not None:
                    break
            # What appeared before its parent was watched sends no event.
            if inode is not None or not os.path.isdir(missing) or not os.access(missing, os.R_OK):
                return inode

    def _add(self, path: str, mask: int) -> tuple[int, int] | None:
        try:
            watch = self._inotify.add(path, mask)
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return None
        except OSError as error:
            raise Unavailable(error) from error
        self._paths[watch] = path
        return status.st_dev, status.st_ino
