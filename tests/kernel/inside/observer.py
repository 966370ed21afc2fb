# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Runs in the guest beside the plugin and knows nothing of it: when the kernel's own events in /dev/vfio came.

A line in asks for what came since the last one, a JSON line out tells it. Times are CLOCK_MONOTONIC in ns. A node that
was there already when its folder could be watched is told as `present`. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import struct
import sys
import time

ATTRIB, CREATE, DELETE, DELETE_SELF, IGNORED, ISDIR = 0x4, 0x100, 0x200, 0x400, 0x8000, 0x40000000
NAMES = {ATTRIB: "attrib", CREATE: "create", DELETE: "delete", DELETE_SELF: "delete-self", IGNORED: "ignored"}
WATCHED = ("/dev", "/dev/vfio", "/dev/vfio/devices")
EVENT = struct.Struct("iIII")


class Observer:
    """Watches the folders that exist, and those that come to exist."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._paths: dict[int, str] = {}
        self.seen: list[dict[str, object]] = []
        for path in WATCHED:
            self._watch(path)

    def _watch(self, path: str) -> None:
        descriptor = self._libc.inotify_add_watch(self.descriptor, path.encode(), CREATE | DELETE | DELETE_SELF)
        if descriptor < 0:
            return
        self._paths[descriptor] = path
        for name in sorted(os.listdir(path)) if path != "/dev" else ():
            self._note("present", f"{path}/{name}", time.monotonic_ns())

    def _note(self, what: str, path: str, at_ns: int) -> None:
        self.seen.append({"what": what, "path": path, "at_ns": at_ns})

    def read(self) -> None:
        """Note what the kernel has queued."""
        at_ns = time.monotonic_ns()
        data = os.read(self.descriptor, 1 << 16)
        offset = 0
        while offset < len(data):
            descriptor, mask, _, length = EVENT.unpack_from(data, offset)
            name = data[offset + EVENT.size : offset + EVENT.size + length].rstrip(b"\0").decode()
            offset += EVENT.size + length
            folder = self._paths.get(descriptor, "")
            path = f"{folder}/{name}" if name else folder
            for bit, what in NAMES.items():
                if (mask & bit and folder != "/dev") or (path == "/dev/vfio" and mask & bit):
                    self._note(what, path, at_ns)
            if mask & IGNORED:
                self._paths.pop(descriptor, None)
            if mask & CREATE and path in WATCHED:
                self._watch(path)


def main() -> None:
    """Watch until the input ends."""
    observer = Observer()
    while True:
        readable = select.select([observer.descriptor, sys.stdin], [], [])[0]
        if observer.descriptor in readable:
            observer.read()
        elif not sys.stdin.readline():
            return
        else:
            offset_ns = time.time_ns() - time.monotonic_ns()
            answer = {"events": observer.seen, "realtime_minus_monotonic_ns": offset_ns}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
            observer.seen = []


if __name__ == "__main__":
    main()
