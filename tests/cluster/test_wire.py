# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""What is no kubelet, on the plugin's sockets: noise, other protocols, half calls, calls that do not exist."""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from grpclib import GRPCError
from grpclib.client import Channel, UnaryUnaryMethod
from tests.cluster.host import GPU, SWITCH, Host, NewHost, patience

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb
from simcluster.plugin import PluginProcess

# Source: RFC 9113, sections 3.4 (preface), 4.1 (frame header) and 6 (types)
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"", *, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return struct.pack(">I", size)[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def noise(seed: int) -> Iterator[bytes]:
    """Yield what to send on one connection each; the same for the same seed."""
    source = random.Random(seed)
    settings = PREFACE + frame(SETTINGS)
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of TLS
    yield PREFACE[:10]
    yield PREFACE
    yield settings + frame(SETTINGS, length=0xFFFFFF)
    yield settings + frame(HEADERS, 4, 1, b"\xff" * 20)
    yield settings + frame(DATA, 1, 1, b"no such stream")
    yield settings + frame(HEADERS, 0, 1, b"") + frame(DATA, 0, 1, b"in between")
    yield settings + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0))
    yield settings + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 0x7FFFFFFF)) * 2
    yield settings + frame(SETTINGS, 0, 0, b"\x00" * 5)
    yield settings + frame(PING, 0, 0, b"short")
    yield settings + frame(RST_STREAM, 0, 1, b"\x00\x00\x00\x08")
    yield settings + frame(GOAWAY, 0, 0, b"\x00" * 8)
    yield settings + frame(CONTINUATION, 4, 1, b"")
    yield settings + frame(0xEE, 0xFF, 0x7FFFFFFF, source.randbytes(100))
    for _ in range(20):
        yield source.randbytes(source.randrange(1, 400))
        yield settings + source.randbytes(source.randrange(1, 400))
        yield settings + frame(
            source.randrange(12), source.randrange(256), source.randrange(8), source.randbytes(source.randrange(64))
        )


async def send(path: Path, data: bytes) -> None:
    """Send bytes, say that there are no more, and wait for the end of the connection, or let it be reset."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(data)
        if writer.can_write_eof():
            writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
    except ConnectionError:
        return


async def is_unharmed(host: Host, plugin: PluginProcess, mark: int) -> None:
    """Check that the kubelet noticed nothing and that nothing was written."""
    assert plugin.is_running
    assert {resource: host.kubelet.streams(resource) for resource in (GPU, SWITCH)} == {GPU: 1, SWITCH: 1}
    assert len(host.kubelet.accepted(GPU)) == 1
    assert plugin.lines.events(since=mark) == []
    plugin.lines.check()
    assert len((await host.kubelet.allocate("pod", "main", GPU, 8)).cdi) == 8
    host.kubelet.free("pod")


async def running(host: Host) -> PluginProcess:
    plugin = await host.plugin()
    await host.served()
    for resource in (GPU, SWITCH):
        await plugin.lines.wait_for("kubelet.listening", resource=resource)
    return plugin


def own_socket(host: Host, resource: str = GPU) -> Path:
    return host.paths.device_plugin_dir / host.kubelet.accepted(resource)[0].endpoint


async def test_noise_on_the_socket_harms_nobody(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await running(host)
        mark, opened = plugin.lines.mark(), len(os.listdir(f"/proc/{plugin.pid}/fd"))
        for seed in range(3):
            for data in noise(seed):
                await send(own_socket(host), data)
        await is_unharmed(host, plugin, mark)
        # Connections that are over are closed.
        await host.wait_for(lambda: len(os.listdir(f"/proc/{plugin.pid}/fd")) <= opened)


async def test_connections_that_say_nothing_harm_nobody(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await running(host)
        mark = plugin.lines.mark()
        silent = [await asyncio.open_unix_connection(str(own_socket(host))) for _ in range(50)]
        for _, writer in silent[::2]:
            writer.write(PREFACE + frame(SETTINGS) + frame(HEADERS, 0, 1, b"")[:5])
        await is_unharmed(host, plugin, mark)
        for _, writer in silent:
            writer.close()
        ended = await plugin.terminate()
        assert ended.seconds < patience(1)


class Raw:
    """A message that is whatever bytes it was given."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data

    def SerializeToString(self) -> bytes:  # noqa: N802 - the name that the codec calls
        return self.data

    @classmethod
    def FromString(cls, data: bytes) -> Raw:  # noqa: N802 - likewise
        return cls(data)


class _AnyBytes:
    """A codec that leaves bytes alone."""

    __content_subtype__ = "proto"

    def encode(self, message: Raw, _: Any) -> bytes:
        return message.data

    def decode(self, data: bytes, _: Any) -> Raw:
        return Raw(data)


@pytest.mark.parametrize(
    "method",
    [
        "/v1beta1.DevicePlugin/Deallocate",
        "/v1beta1.Registration/Register",
        "/v1.DevicePlugin/Allocate",
        "/grpc.health.v1.Health/Check",
        "/",
        "nonsense",
    ],
)
async def test_a_method_that_does_not_exist_is_an_error_of_the_call_alone(method: str, new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await host.plugin_in_process()
        await host.served()
        async with Channel(path=str(own_socket(host))) as channel:
            with pytest.raises(GRPCError):
                await UnaryUnaryMethod(channel, method, pb.Empty, pb.Empty)(pb.Empty())
            # The connection is as good as before.
            options = UnaryUnaryMethod(
                channel, "/v1beta1.DevicePlugin/GetDevicePluginOptions", pb.Empty, pb.DevicePluginOptions
            )
            assert (await options(pb.Empty())).get_preferred_allocation_available
        assert "allocation.refused" not in plugin.lines.events()


async def test_bytes_that_are_no_message_are_an_error_of_the_call_alone(new_host: NewHost) -> None:
    malformed = (b"\xff", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05", random.Random(1).randbytes(200))
    async with new_host() as host:
        plugin = await running(host)
        mark = plugin.lines.mark()
        async with Channel(path=str(own_socket(host)), codec=_AnyBytes()) as channel:  # type: ignore[arg-type]
            for name in ("Allocate", "GetPreferredAllocation", "PreStartContainer"):
                for data in malformed:
                    with pytest.raises(GRPCError):
                        await UnaryUnaryMethod(channel, f"/v1beta1.DevicePlugin/{name}", Raw, Raw)(Raw(data))
        await is_unharmed(host, plugin, mark)


async def test_a_caller_that_goes_away_in_the_middle_harms_nobody(new_host: NewHost) -> None:
    async with new_host() as host:
        plugin = await running(host)
        mark = plugin.lines.mark()
        for _ in range(20):
            channel = Channel(path=str(own_socket(host)))
            method = UnaryUnaryMethod(
                channel, "/v1beta1.DevicePlugin/Allocate", pb.AllocateRequest, pb.AllocateResponse
            )
            call = asyncio.ensure_future(method(pb.AllocateRequest()))
            await asyncio.sleep(0)
            channel.close()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            channel.close()
        await is_unharmed(host, plugin, mark)
