# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The CDI files of this plugin: their text (pure), and their replacement on disk.

A CDI file tells the container runtime and Kata which device node stands behind a name. Kata refuses every sandbox of
the node when any CDI file is broken, so a file is replaced by a rename, whole, and is left alone when it already says
the same. Names of the form `kata.<vendor>-<class>.json`, for vendors in `resources.RESOURCES`, belong to this plugin;
no other file is ever touched.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii as _quoted
from typing import Final

from kata_device_plugin.errors import SpecUnwritable
from kata_device_plugin.resources import Resource

# The lowest version that allows a device name beginning with a digit, and low enough for the CDI library 0.6.0 that
# Kata's Go runtime is built with.
# Source: github.com/container-orchestrated-devices/container-device-interface v0.6.0, pkg/cdi/version.go
SPEC_VERSION: Final = "0.5.0"

# A temporary file of another live instance is at most a moment old.
_STALE_AFTER_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One device of a CDI file: its name, and the path of its node on the host."""

    name: str
    node: str


def document(resource: Resource, entries: Iterable[Entry]) -> bytes:
    """Return the CDI file of a resource as JSON, a device a line, in the order given.

    One character device per device and nothing else: no numbers, so that the runtime looks them up when it needs them,
    and no other edits.
    """
    lines = ",\n".join(
        f'    {{"name": {_quoted(entry.name)}, "containerEdits": {{"deviceNodes": '
        f'[{{"path": {_quoted(entry.node)}, "type": "c", "permissions": "rw"}}]}}}}'
        for entry in entries
    )
    kind = _quoted(resource.name)
    return f'{{\n  "cdiVersion": "{SPEC_VERSION}",\n  "kind": {kind},\n  "devices": [\n{lines}\n  ]\n}}\n'.encode()


class SpecFile:
    """The CDI file of one resource in the dynamic directory, and what is known to stand in it.

    Writes: <cdi-dir>/kata.<vendor>-<class>.json, through a temporary file beside it
    """

    def __init__(self, directory: str, resource: Resource) -> None:
        """Describe the file; nothing is read or written yet."""
        self.resource = resource
        self.path = os.path.join(directory, resource.spec_file)
        self._directory = directory
        self._entries: tuple[Entry, ...] = ()
        self._on_disk: tuple[Entry, ...] = ()
        self._seen: tuple[int, ...] | None = None

    @property
    def on_disk(self) -> frozenset[Entry]:
        """What the file says as far as this process knows; differs from what it should say after a failure only."""
        return frozenset(self._on_disk)

    def replace(self, entries: Sequence[Entry]) -> bool:
        """Make the file on disk name exactly these devices; without any, make it go. Say whether it changed.

        Raises: SpecUnwritable; the next call, whatever its entries, tries again.
        """
        self._entries = tuple(entries)
        return self.restore()

    def restore(self) -> bool:
        """Make the file say what it should, if somebody removed or changed it. Say whether it had to be changed.

        One `stat` when nothing happened.

        Raises: SpecUnwritable.
        """
        try:
            if not self._entries:
                return self._remove()
            seen = _identity(self.path)
            if seen is not None and seen == self._seen:
                # Nobody touched it since, so what it says is known.
                if self._on_disk == self._entries:
                    return False
            elif seen is not None and self._says_so():
                self._seen, self._on_disk = seen, self._entries
                return False
            self._write(document(self.resource, self._entries))
        except OSError as error:
            if _identity(self.path) != self._seen:
                self._on_disk = ()  # it is not what was written here, whatever it says
            self._give_up_false_entries()
            raise SpecUnwritable(self.path, error) from error
        return True

    def _give_up_false_entries(self) -> None:
        """Remove a file that can't be replaced and names a node which now belongs to another device.

        Otherwise a container that restarts under the old name would be given the other device. Removing works where
        writing does not on a full file system.
        """
        owners = {entry.node: entry.name for entry in self._entries}
        if any(owners.get(entry.node, entry.name) != entry.name for entry in self._on_disk):
            try:
                self._remove()
            except OSError:
                return

    def _says_so(self) -> bool:
        """Whether the file means what it should, in whatever spelling: another version of this plugin may write too."""
        try:
            with open(self.path, "rb") as file:
                found = json.load(file)
        except (OSError, ValueError, RecursionError):
            return False
        return bool(found == json.loads(document(self.resource, self._entries)))

    def _write(self, data: bytes) -> None:
        os.makedirs(self._directory, mode=0o755, exist_ok=True)
        temporary = os.path.join(self._directory, f".{self.resource.spec_file}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            try:
                os.fchmod(descriptor, 0o644)  # the mode above is subject to the umask
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, self.path)
        except BaseException:
            _unlink(temporary)
            raise
        self._seen, self._on_disk = _identity(self.path), self._entries

    def _remove(self) -> bool:
        gone = _unlink(self.path)
        self._seen, self._on_disk = None, ()
        return gone


def sweep(directory: str, resources: Iterable[Resource], *, now_s: float | None = None) -> tuple[str, ...]:
    """Remove what earlier versions and crashed instances of this plugin left behind; return the paths removed.

    That is files under our names for resources that there no longer are, and temporary files older than a minute.
    What can't be read or removed stays.
    """
    now_s = time.time() if now_s is None else now_s
    current = {resource.spec_file for resource in resources}
    vendors = {resource.name.partition("/")[0] for resource in resources}
    removed = []
    for name in _names(directory):
        path = os.path.join(directory, name)
        try:
            if any(name.startswith(f".kata.{vendor}-") and name.endswith(".tmp") for vendor in vendors):
                stale = now_s - os.lstat(path).st_mtime > _STALE_AFTER_S
            else:
                stale = is_own(name, vendors) and name not in current
            if stale and _unlink(path):
                removed.append(path)
        except OSError:
            continue
    return tuple(removed)


def is_own(name: str, vendors: Iterable[str]) -> bool:
    """Whether a base name is one that this plugin keeps for itself."""
    return name.endswith(".json") and any(name.startswith(f"kata.{vendor}-") for vendor in vendors)


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True
