# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The DevicePlugin service of one resource, on one unix socket.

The kubelet replaces everything that it knows of a resource with each message of the list, so only the newest list is
ever sent, to as many listeners as there are: after a new registration the kubelet briefly has two.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, Final

from grpclib import GRPCError
from grpclib.const import Cardinality, Handler, Status
from grpclib.server import Server, Stream

from kata_device_plugin.errors import NotAllocatable, PathTooLong, PluginError
from kata_device_plugin.offer import Offer
from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb

# sockaddr_un holds 108 bytes with the terminating NUL. Source: Linux include/uapi/linux/un.h
SOCKET_PATH_LIMIT: Final = 107
_TOKEN_BYTES: Final = 4

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

OPTIONS: Final = pb.DevicePluginOptions(pre_start_required=False, get_preferred_allocation_available=True)


def socket_path(directory: str, prefix: str) -> str:
    """Return a path for a socket that no other has, of this or of any other process.

    Raises: PathTooLong.
    """
    path = os.path.join(directory, f"{prefix}{os.urandom(_TOKEN_BYTES).hex()}.sock")
    if len(os.fsencode(path)) > SOCKET_PATH_LIMIT:
        raise PathTooLong(path, SOCKET_PATH_LIMIT)
    return path


def is_socket_name(name: str, prefix: str) -> bool:
    """Whether a base name is one that `socket_path` makes with this prefix, and with no longer one."""
    return re.fullmatch(f"{re.escape(prefix)}[0-9a-f]{{{2 * _TOKEN_BYTES}}}\\.sock", name) is not None


def device_list(offer: Offer) -> pb.ListAndWatchResponse:
    """Return the list as the kubelet reads it, by address."""
    lines = [_line(device.address.text, device.healthy, device.place.numa_node) for device in offer.listed]
    return pb.ListAndWatchResponse.FromString(b"".join(lines))


@lru_cache(maxsize=4096)
def _line(device_id: str, healthy: bool, numa_node: int | None) -> bytes:  # noqa: FBT001 - a key of the cache
    """Return a list of one device, serialised: lists one after the other are one list, and most lines never change.

    Source: protobuf encoding, "Last One Wins": repeated fields of concatenated messages are concatenated.
    """
    device = pb.Device(ID=device_id, health=HEALTHY if healthy else UNHEALTHY)
    if numa_node is not None:
        device.topology.nodes.add(ID=numa_node)
    return pb.ListAndWatchResponse(devices=[device]).SerializeToString()


class ResourceServer:
    """Serves one offer on one socket, and knows how many kubelet streams listen to it there.

    A socket is bound once: to listen again, under a name of its own, is another server's business.
    """

    def __init__(
        self,
        offer: Offer,
        path: str,
        *,
        granted: Callable[[tuple[str, ...]], None],
        refused: Callable[[PluginError], None],
        listeners_changed: Callable[[], None],
    ) -> None:
        """Describe the server; the callbacks are told of grants, refusals, and of listeners that come and go."""
        self.path = path
        self.listeners = 0
        self.was_heard = False
        """Whether a stream was ever opened, be it over by now."""
        self._offer = offer
        self._granted = granted
        self._refused = refused
        self._listeners_changed = listeners_changed
        self._server: Server | None = None
        self._inode: int | None = None

    async def serve(self) -> None:
        """Listen.

        Raises: OSError when the socket can't be bound.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self.path)
            self._inode = os.lstat(self.path).st_ino
            listener.listen(16)
            server = Server([self])
            await server.start(sock=listener)
        except BaseException:
            listener.close()
            raise
        self._server = server

    def is_reachable(self) -> bool:
        """Whether the socket on disk is still the one that is listened on."""
        try:
            return self._server is not None and os.lstat(self.path).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        """Stop listening and end every call, at once. The socket file stays: see `unlink`."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def unlink(self) -> None:
        """Remove the socket file, if it still is ours."""
        with suppress(OSError):
            if os.lstat(self.path).st_ino == self._inode:
                os.unlink(self.path)

    def __mapping__(self) -> dict[str, Handler]:
        """Return the methods for grpclib, by their full path."""
        service = "/v1beta1.DevicePlugin/"
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            service + "GetDevicePluginOptions": Handler(self._options, unary, pb.Empty, pb.DevicePluginOptions),
            service + "ListAndWatch": Handler(self._list_and_watch, streaming, pb.Empty, pb.ListAndWatchResponse),
            service + "GetPreferredAllocation": Handler(
                self._preferred, unary, pb.PreferredAllocationRequest, pb.PreferredAllocationResponse
            ),
            service + "Allocate": Handler(self._allocate, unary, pb.AllocateRequest, pb.AllocateResponse),
            service + "PreStartContainer": Handler(
                self._pre_start, unary, pb.PreStartContainerRequest, pb.PreStartContainerResponse
            ),
        }

    async def _options(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(OPTIONS)

    async def _list_and_watch(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        changed = asyncio.Event()
        unsubscribe = self._offer.subscribe(changed.set)
        try:
            with self._listening():
                while True:
                    changed.clear()
                    await stream.send_message(device_list(self._offer))
                    await changed.wait()
        finally:
            unsubscribe()

    async def _preferred(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message() or pb.PreferredAllocationRequest()
        answers = [
            pb.ContainerPreferredAllocationResponse(
                deviceIDs=self._offer.prefer(
                    container.available_deviceIDs, container.must_include_deviceIDs, container.allocation_size
                )
            )
            for container in request.container_requests
        ]
        await stream.send_message(pb.PreferredAllocationResponse(container_responses=answers))

    async def _allocate(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message() or pb.AllocateRequest()
        answers = []
        for container in request.container_requests:
            names = self._grant(tuple(container.devices_ids))
            answers.append(pb.ContainerAllocateResponse(cdi_devices=[pb.CDIDevice(name=name) for name in names]))
        await stream.send_message(pb.AllocateResponse(container_responses=answers))
        for container in request.container_requests:
            # When the answer is out: a pod waits for it.
            asyncio.get_running_loop().call_soon(self._granted, tuple(container.devices_ids))

    async def _pre_start(self, stream: Stream[Any, Any]) -> None:
        # Never asked for (see OPTIONS); whoever calls it all the same gets the same check as Allocate.
        request = await stream.recv_message() or pb.PreStartContainerRequest()
        self._grant(tuple(request.devices_ids))
        await stream.send_message(pb.PreStartContainerResponse())

    def _grant(self, device_ids: tuple[str, ...]) -> tuple[str, ...]:
        try:
            return self._offer.grant(device_ids)
        except PluginError as error:
            self._refused(error)
            status = Status.NOT_FOUND if isinstance(error, NotAllocatable) else Status.UNAVAILABLE
            raise GRPCError(status, f"{error}; {error.hint}") from error

    @contextmanager
    def _listening(self) -> Iterator[None]:
        self.listeners += 1
        self.was_heard = True
        self._listeners_changed()
        try:
            yield
        finally:
            self.listeners -= 1
            self._listeners_changed()
