# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A server of the vfio-user protocol: gives QEMU a PCI function that lives in this process.

One thread and one socket per function, one client at a time. No BAR can be mapped, so every access of the guest
arrives as a message. Interrupts and memory of the guest are accepted and never used.

Source: the vfio-user protocol specification 0.9.2 (QEMU docs/interop/vfio-user.rst); region and interrupt indices
from Linux include/uapi/linux/vfio.h.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
import threading
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

from vmlab.device import CONFIG_SIZE, Function, Reset

_HEADER: Final = struct.Struct("<HHIII")
_ACCESS: Final = struct.Struct("<QII")
_TYPE_REPLY: Final = 1
_NO_REPLY: Final = 1 << 4
_ERROR: Final = 1 << 5
_LARGEST: Final = 1 << 20
_DESCRIPTORS: Final = 64

_CONFIG_REGION: Final = 7
_REGIONS: Final = 9
_INTERRUPTS: Final = 5
_REGION_READ_WRITE: Final = 3
_DEVICE_RESETS_AND_IS_PCI: Final = 3
_CAPABILITIES: Final = b'{"capabilities":{"max_msg_fds":8}}\0'


class Command(IntEnum):
    """The commands that QEMU sends."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    DEVICE_GET_INFO = 4
    DEVICE_GET_REGION_INFO = 5
    DEVICE_GET_REGION_IO_FDS = 6
    DEVICE_GET_IRQ_INFO = 7
    DEVICE_SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    DMA_READ = 11
    DMA_WRITE = 12
    DEVICE_RESET = 13


class Refusal(Exception):
    """The answer to a message is an error; `number` is the errno."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def reply_to(function: Function, command: int, body: bytes) -> bytes:
    """Do what one message asks, and return the body of the reply.

    Raises: Refusal.
    """
    match command:
        case Command.REGION_READ:
            offset, region, count = _ACCESS.unpack_from(body)
            return _ACCESS.pack(offset, region, count) + _read(function, region, offset, count)
        case Command.REGION_WRITE:
            offset, region, count = _ACCESS.unpack_from(body)
            _write(function, region, offset, body[_ACCESS.size : _ACCESS.size + count])
            return _ACCESS.pack(offset, region, count)
        case Command.VERSION:
            major, minor = struct.unpack_from("<HH", body)
            return struct.pack("<HH", major, minor) + _CAPABILITIES
        case Command.DEVICE_GET_INFO:
            return struct.pack("<IIII", 16, _DEVICE_RESETS_AND_IS_PCI, _REGIONS, _INTERRUPTS)
        case Command.DEVICE_GET_REGION_INFO:
            (region,) = struct.unpack_from("<I", body, 8)
            size = CONFIG_SIZE if region == _CONFIG_REGION else function.bar_size(region)
            return struct.pack("<IIIIQQ", 32, _REGION_READ_WRITE if size else 0, region, 0, size, 0)
        case Command.DEVICE_GET_IRQ_INFO:
            (index,) = struct.unpack_from("<I", body, 8)
            return struct.pack("<IIII", 16, 0, index, 0)
        case Command.DEVICE_RESET:
            function.reset(Reset.DEVICE)
            return b""
        case Command.DMA_UNMAP:
            return body
        case Command.DMA_MAP | Command.DEVICE_SET_IRQS:
            return b""
        case _:
            raise Refusal(errno.EOPNOTSUPP)


def _read(function: Function, region: int, offset: int, count: int) -> bytes:
    if region == _CONFIG_REGION and offset + count <= CONFIG_SIZE:
        return function.read_config(offset, count)
    if count > 0 and offset + count <= function.bar_size(region):
        return function.read_bar(region, offset, count).to_bytes(count, "little")
    raise Refusal(errno.EINVAL)


def _write(function: Function, region: int, offset: int, data: bytes) -> None:
    if region == _CONFIG_REGION and offset + len(data) <= CONFIG_SIZE:
        function.write_config(offset, data)
    elif data and offset + len(data) <= function.bar_size(region):
        function.write_bar(region, offset, len(data), int.from_bytes(data, "little"))
    else:
        raise Refusal(errno.EINVAL)


class Server:
    """Serves one function on a Unix socket, in a thread of its own, until closed."""

    def __init__(self, function: Function, path: Path) -> None:
        self.function = function
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(1)
        self._client: socket.socket | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"vfio-user {path.name}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving and wait for the thread."""
        self._closing = True
        for end in (self._listening, self._client):
            if end is not None:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue
        self._thread.join()
        self._listening.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            with client:
                self._client = client
                try:
                    self._converse(client)
                except (EOFError, OSError):
                    continue  # QEMU ended; the next one may come
                finally:
                    self._client = None

    def _converse(self, client: socket.socket) -> None:
        while True:
            number, command, size, flags, _ = _HEADER.unpack(_receive(client, _HEADER.size))
            if not _HEADER.size <= size <= _LARGEST:
                raise EOFError
            body = _receive(client, size - _HEADER.size)
            answer, problem = b"", 0
            try:
                answer = reply_to(self.function, command, body)
            except Refusal as refusal:
                problem = refusal.number
            if flags & _NO_REPLY:
                continue
            answered = _TYPE_REPLY | (_ERROR if problem else 0)
            client.sendall(_HEADER.pack(number, command, _HEADER.size + len(answer), answered, problem) + answer)


def _receive(client: socket.socket, size: int) -> bytes:
    """Read exactly so many bytes; descriptors that come along are closed.

    Raises: EOFError when the other side has closed.
    """
    data = b""
    while len(data) < size:
        part, ancillary, _, _ = client.recvmsg(size - len(data), socket.CMSG_SPACE(4 * _DESCRIPTORS))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
                for descriptor in descriptors:
                    os.close(descriptor)
        if not part:
            raise EOFError
        data += part
    return data
