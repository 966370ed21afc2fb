# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A vfio-user server: one PCI function behind a unix socket, for QEMU's vfio-user-pci.

No memory is shared, so every access to a BAR is a message and is seen. The function raises no interrupts and does no
DMA: what QEMU says about guest memory is acknowledged and forgotten.

Source: QEMU docs/interop/vfio-user.rst; region and interrupt indices from Linux include/uapi/linux/vfio.h
"""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

from vmlab.config_space import SIZE as CONFIG_BYTES
from vmlab.device import BAR0, PciFunction


class Command(IntEnum):
    """What a message asks for."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    DEVICE_GET_INFO = 4
    DEVICE_GET_REGION_INFO = 5
    DEVICE_GET_IRQ_INFO = 7
    DEVICE_SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    DEVICE_RESET = 13


HEADER: Final = struct.Struct("<HHIII")
_REPLY: Final = 0x01
_NO_REPLY: Final = 0x10
_ERROR: Final = 0x20

_CONFIG_REGION: Final = 7
_REGIONS: Final = 9
_INTERRUPTS: Final = 5
_READABLE_AND_WRITABLE: Final = 0x3
_CAN_RESET_AND_IS_PCI: Final = 0x3
_ACCESS: Final = struct.Struct("<QII")

# More than any message here; a larger one is no vfio-user.
_LONGEST: Final = 1 << 21


class Refused(Exception):
    """A request is answered with this error number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Server:
    """Serves one function until it is closed; one client at a time, any number one after the other.

    A context manager. Runs in a thread of this process, so a test can look at the function while the guest uses it.
    """

    def __init__(self, function: PciFunction, path: Path) -> None:
        """Listen at `path`."""
        self.function = function
        self.path = path
        self.problems: list[str] = []
        """Requests that could not be understood, as text. Nothing in here is expected."""
        self._handlers: dict[int, Callable[[bytes], bytes]] = {
            Command.VERSION: self._version,
            Command.DMA_MAP: lambda _: b"",
            Command.DMA_UNMAP: lambda body: body[:24],
            Command.DEVICE_GET_INFO: self._device_info,
            Command.DEVICE_GET_REGION_INFO: self._region_info,
            Command.DEVICE_GET_IRQ_INFO: self._interrupt_info,
            Command.DEVICE_SET_IRQS: lambda _: b"",
            Command.REGION_READ: self._read,
            Command.REGION_WRITE: self._write,
            Command.DEVICE_RESET: self._reset,
        }
        self._closing = False
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, name=f"vfio-user {function.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up and stop listening."""
        self._closing = True
        for connection in (self._listener, self._client):
            if connection is not None:
                # A thread that waits in accept or recv only wakes when the socket is shut down.
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                self._client = client
                self.function.attach()
                try:
                    while self._serve_one(client):
                        pass
                except OSError as error:
                    if not self._closing:
                        self.problems.append(f"connection: {error}")
                self._client = None

    def _serve_one(self, client: socket.socket) -> bool:
        """Answer one message; return whether there was one."""
        header = _receive(client, HEADER.size)
        if header is None:
            return False
        number, command, size, flags, _ = HEADER.unpack(header)
        if not HEADER.size <= size <= _LONGEST:
            self.problems.append(f"command {command} of {size} bytes")
            return False
        body = b""
        if size > HEADER.size:
            received = _receive(client, size - HEADER.size)
            if received is None:
                return False
            body = received
        reply, error = b"", 0
        try:
            reply = self._handle(command, body)
        except Refused as refusal:
            error = refusal.number
        if not flags & _NO_REPLY:
            flags = _REPLY | (_ERROR if error else 0)
            client.sendall(HEADER.pack(number, command, HEADER.size + len(reply), flags, error) + reply)
        return True

    def _handle(self, command: int, body: bytes) -> bytes:
        handler = self._handlers.get(command)
        if handler is None:
            raise Refused(errno.ENOTSUP)
        try:
            return handler(body)
        except (ValueError, struct.error) as error:
            self.problems.append(f"{Command(command).name}: {error}")
            raise Refused(errno.EINVAL) from error

    def _version(self, body: bytes) -> bytes:
        # The reply holds the version that was proposed, and of the capabilities none: the defaults do.
        major, minor = struct.unpack_from("<HH", body)
        if major != 0:
            raise Refused(errno.EINVAL)
        return struct.pack("<HH", major, minor) + json.dumps({"capabilities": {}}).encode() + b"\0"

    def _device_info(self, _: bytes) -> bytes:
        return struct.pack("<IIII", 16, _CAN_RESET_AND_IS_PCI, _REGIONS, _INTERRUPTS)

    def _region_info(self, body: bytes) -> bytes:
        _, _, index = struct.unpack_from("<III", body)
        if index >= _REGIONS:
            raise Refused(errno.EINVAL)
        size = CONFIG_BYTES if index == _CONFIG_REGION else self.function.identity.bars.get(index, 0)
        return struct.pack("<IIIIQQ", 32, _READABLE_AND_WRITABLE if size else 0, index, 0, size, 0)

    def _interrupt_info(self, body: bytes) -> bytes:
        _, _, index = struct.unpack_from("<III", body)
        return struct.pack("<IIII", 16, 0, index, 0)

    def _read(self, body: bytes) -> bytes:
        offset, region, size = _ACCESS.unpack_from(body)
        if region == _CONFIG_REGION:
            content = self.function.read_config(offset, size)
        else:
            self._check_bar(region, offset, size)
            content = self.function.read_bar(offset, size).to_bytes(size, "little")
        return _ACCESS.pack(offset, region, size) + content

    def _write(self, body: bytes) -> bytes:
        offset, region, size = _ACCESS.unpack_from(body)
        content = body[_ACCESS.size :]
        if len(content) != size:
            raise ValueError(f"{len(content)} bytes, expected {size}")
        if region == _CONFIG_REGION:
            self.function.write_config(offset, content)
        else:
            self._check_bar(region, offset, size)
            self.function.write_bar(offset, size, int.from_bytes(content, "little"))
        return _ACCESS.pack(offset, region, size)

    def _check_bar(self, region: int, offset: int, size: int) -> None:
        # There is one BAR, and its size is that of the region.
        length = self.function.identity.bars.get(region) if region == BAR0 else None
        if length is None or size < 1 or offset + size > length:
            raise ValueError(f"access to {size} bytes at {offset:#x} of region {region}")

    def _reset(self, _: bytes) -> bytes:
        self.function.reset()
        return b""


def _receive(client: socket.socket, size: int) -> bytes | None:
    """Return exactly so many bytes, or None at the end. Descriptors of guest memory that come along are closed."""
    received = b""
    while len(received) < size:
        chunk, ancillary, _, _ = client.recvmsg(size - len(received), socket.CMSG_SPACE(16 * 4))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                for descriptor in descriptors:
                    os.close(descriptor)
        if not chunk:
            return None
        received += chunk
    return received
