# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The three system calls of inotify.

The one module of the plugin that uses ctypes. The libraries that wrap inotify find the C library by
`ctypes.util.find_library`, which runs ldconfig, gcc or ld; this program must not start a process, and its image has
none of them. The C library is the one that the interpreter itself is linked with.

Source: inotify(7), Linux include/uapi/linux/inotify.h
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from typing import Final

ATTRIB: Final = 0x0000_0004
CLOSE_WRITE: Final = 0x0000_0008
MOVED_FROM: Final = 0x0000_0040
MOVED_TO: Final = 0x0000_0080
CREATE: Final = 0x0000_0100
DELETE: Final = 0x0000_0200
DELETE_SELF: Final = 0x0000_0400
MOVE_SELF: Final = 0x0000_0800
UNMOUNT: Final = 0x0000_2000
Q_OVERFLOW: Final = 0x0000_4000
IGNORED: Final = 0x0000_8000
ONLYDIR: Final = 0x0100_0000
MASK_ADD: Final = 0x2000_0000

_HEADER: Final = struct.Struct("iIII")
# Room for a few hundred events; what does not fit stays in the kernel for the next read.
_BUFFER_BYTES: Final = 16_384


@dataclass(frozen=True, slots=True)
class Event:
    """One event: the watch that saw it, the bits above, and the entry's name, empty for the directory itself."""

    watch: int
    mask: int
    name: str


class Inotify:
    """An inotify instance; its descriptor is readable while there are events."""

    def __init__(self) -> None:
        """Open the instance.

        Raises: OSError, with EMFILE when fs.inotify.max_user_instances is reached.
        """
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def close(self) -> None:
        """Close the instance, and with it every watch."""
        os.close(self._descriptor)

    def add(self, path: str, mask: int) -> int:
        """Watch a path; return the number of the watch, which is the same again for the same inode.

        Raises: OSError, with ENOSPC when fs.inotify.max_user_watches is reached.
        """
        return self._checked(
            self._libc.inotify_add_watch(self._descriptor, ctypes.c_char_p(os.fsencode(path)), ctypes.c_uint32(mask))
        )

    def read(self) -> list[Event]:
        """Return the events that are there now, without waiting."""
        try:
            data = os.read(self._descriptor, _BUFFER_BYTES)
        except BlockingIOError:
            return []
        events = []
        offset = 0
        while offset < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, offset)
            offset += _HEADER.size
            name = data[offset : offset + length].rstrip(b"\0")
            offset += length
            events.append(Event(watch, mask, os.fsdecode(name)))
        return events

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            number = ctypes.get_errno() or errno.EIO
            raise OSError(number, os.strerror(number))
        return result
