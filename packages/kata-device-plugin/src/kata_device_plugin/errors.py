# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Errors that an operator reads.

    PluginError
      PathTooLong       a socket below the given directory can't be bound
      SpecUnwritable    a CDI file can't be brought to disk
      NotAllocatable    an id in a request is not one that can be handed out now

Messages follow one grammar: subject, what is wrong, what was expected and found; what to do stands in `hint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import strerror
from typing import ClassVar


class PluginError(Exception):
    """Something that an operator can act upon; `exit_code` is used where it ends the run."""

    exit_code: ClassVar[int] = 20
    hint: str = ""


class PathTooLong(PluginError):
    """A directory is too long for the sockets in it."""

    exit_code: ClassVar[int] = 2
    hint = "give --device-plugin-dir a shorter path, a symbolic link for example"

    def __init__(self, path: str, limit: int) -> None:
        """Keep the path, and the limit in bytes."""
        super().__init__(f"{path}: too long for a unix socket, expected at most {limit} bytes, found {len(path)}")
        self.path = path
        self.limit = limit


class SpecUnwritable(PluginError):
    """A CDI file could not be written or removed; the previous one still stands, whole."""

    hint = "the CDI directory must be writable for this process and must have room; check mount options and SELinux"

    def __init__(self, path: str, error: OSError) -> None:
        """Keep the path and the number of the system's error."""
        super().__init__(f"{path}: cannot be written: {strerror(error.errno) if error.errno else error}")
        self.path = path
        self.errno = error.errno


class NotAllocatable(PluginError):
    """An id that can't be handed out now: never listed, vanished, or no longer what was listed."""

    hint = "delete the pod: its replacement is given devices that are present"

    def __init__(self, resource: str, device_id: str, reason: str, present: Sequence[str]) -> None:
        """Keep what was asked for, why it can't be had, and the healthy ids of the same resource."""
        shown = ", ".join(present[:16]) + (f" and {len(present) - 16} more" if len(present) > 16 else "")
        super().__init__(f"{resource}={device_id}: {reason}; healthy now: {shown or 'none'}")
        self.resource = resource
        self.device_id = device_id
        self.reason = reason
        self.present = tuple(present)
