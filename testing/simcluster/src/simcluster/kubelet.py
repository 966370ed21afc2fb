# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A kubelet's device manager, in the test's own event loop.

It keeps the books as the real one does, in both ways in which real ones keep their connections, and is stricter with
what a plugin sends: what a real kubelet would swallow is kept in `violations`, and ends the test.

Source: k8s.io/kubernetes v1.34.4 and v1.37.2, pkg/kubelet/cm/devicemanager (manager.go, endpoint.go, types.go) and
its plugin/v1beta1 (server.go, handler.go, client.go). The conformance suite runs those themselves.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import stat
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from grpclib import GRPCError
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.config import Configuration
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import ProtocolError, StreamTerminatedError
from grpclib.server import Server, Stream

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb
from simcluster.devices import Device, Received, complaints, devices, preference_complaints
from simcluster.names import is_extended_resource, is_qualified_cdi_name
from simcluster.waiting import DEADLINE_S, Changes

T = TypeVar("T")

API_VERSION: Final = "v1beta1"
SOCKET: Final = "kubelet.sock"
CHECKPOINT: Final = "kubelet_internal_checkpoint"

_PLUGIN: Final = "/v1beta1.DevicePlugin/"
_REGISTER: Final = "/v1beta1.Registration/Register"

# What a Go client opens with, so that a stream that nobody reads is felt by the plugin as early as it would be.
# Source: google.golang.org/grpc internal/transport (initial window size 65535)
_WINDOW: Final = Configuration(http2_connection_window_size=65_535, http2_stream_window_size=65_535)

# How soon a dial is tried again; the real one begins with a second, which only costs time here.
_REDIAL_S: Final = 0.01

# Turns of the loop in which what has begun to happen has happened.
_TURNS: Final = 5

# What a call on a connection that goes away can end with; the last is a mistake of grpclib 0.4.
_CALL_ENDED: Final = (GRPCError, ProtocolError, StreamTerminatedError, OSError, AttributeError)


class Generation(StrEnum):
    """How a kubelet remembers who serves a resource."""

    ONE_CLIENT = "one client per resource"
    """Up to 1.35: the newest replaces the others, and the end of any takes the newest down."""
    BY_SOCKET = "clients by socket path"
    """Newer: each end concerns its own socket; a socket that is connected already is refused."""


class Fault(StrEnum):
    """What a kubelet does wrong with the next registration; see `Kubelet.fail`."""

    REFUSE = "answers Register with an error"
    HANG = "never answers Register"
    DROP_STREAM = "closes the stream after the first list"
    NO_STREAM = "accepts, and never opens the stream"
    STOP_READING = "reads the first list, and nothing after it"


class Refused(Exception):
    """A pod was not admitted: `UnexpectedAdmissionError` on a real node. `reason` is the kubelet's."""

    def __init__(self, resource: str, reason: str) -> None:
        super().__init__(resource, reason)
        self.resource = resource
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.resource}: {self.reason}"


@dataclass(slots=True)
class Attempt:
    """One call of Register. Times are time.monotonic(); `error` is None for one that was accepted."""

    at_s: float
    resource: str
    endpoint: str
    answered_s: float | None = None
    error: str | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether the plugin was told that it is registered."""
        return self.answered_s is not None and self.error is None


@dataclass(frozen=True, slots=True)
class Booking:
    """What one container holds of one resource, and what the runtime is told about it."""

    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    cdi: tuple[str, ...]


@dataclass(slots=True, eq=False)
class _Client:
    """A connection to one socket of a plugin."""

    resource: str
    path: str
    channel: Channel
    options: pb.DevicePluginOptions = field(default_factory=pb.DevicePluginOptions)
    stopped_s: float | None = None
    is_open: bool = False


class _Listener(socket.socket):
    """A listening socket that remembers its connections: when a process dies they all end at once."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.accepted: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self.accepted.append(connection)
        return connection, address


class Kubelet:
    """One node's kubelet. As a context manager it starts, and dies at the end; after that it has no complaints left.

    `directory` stands for /var/lib/kubelet/device-plugins. `dial_timeout_s` is how long a plugin may take to answer
    inside Register, `stop_grace_s` how long a resource that nobody serves stays in the node's capacity. Ids are taken
    in an order that `seed` decides, as the real one takes them in none.
    """

    def __init__(
        self,
        directory: Path,
        *,
        generation: Generation = Generation.BY_SOCKET,
        dial_timeout_s: float = 10.0,
        stop_grace_s: float = 300.0,
        seed: int = 0,
        changes: Changes | None = None,
    ) -> None:
        self.directory = directory
        self.generation = generation
        self.changes = changes or Changes()
        self.attempts: list[Attempt] = []
        self.violations: list[str] = []
        self.on_list: Callable[[str, Received], None] = lambda *_: None
        """What to do with each list in the moment in which it comes in."""
        self._dial_timeout_s = dial_timeout_s
        self._stop_grace_s = stop_grace_s
        self._random = random.Random(seed)
        self._faults: dict[str | None, Fault] = {}
        self._listener: _Listener | None = None
        self._server: Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialled: list[Channel] = []
        self._history: dict[str, list[Received]] = {}
        # The books. A real kubelet has these maps under much the same names.
        self._clients: dict[str, list[_Client]] = {}
        self._endpoints: dict[str, _Client | None] = {}
        self._watched: list[_Client] = []
        self._store: dict[str, dict[str, _Client]] = {}
        self._stopped_s: dict[str, float] = {}
        self._devices: dict[str, dict[str, Device]] = {}
        self._healthy: dict[str, frozenset[str]] = {}
        self._unhealthy: dict[str, frozenset[str]] = {}
        self._bookings: dict[tuple[str, str, str], Booking] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.kill()
        if kind is None:
            self.check()

    @property
    def socket(self) -> Path:
        """The registration socket."""
        return self.directory / SOCKET

    # The life of a kubelet.

    async def start(self, *, sweep: bool = True, bound_s: float = 0.0, deaf: bool = False) -> None:
        """Come up as after a start of the service, with the bookings of the checkpoint.

        `sweep` removes every socket in the directory first; without it only the own one. `bound_s` is how long the
        socket is there before it listens. A `deaf` kubelet takes connections and reads nothing, until `hear`.
        """
        assert self._listener is None, "this kubelet runs already"
        self.directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        self._read_checkpoint()
        if sweep:
            self._sweep()
        else:
            self.socket.unlink(missing_ok=True)
        self._listener = _Listener()
        self._listener.bind(str(self.socket))
        if bound_s:
            await asyncio.sleep(bound_s)
        self._listener.listen(16)
        if not deaf:
            await self.hear()

    async def hear(self) -> None:
        """End deafness: what has come in meanwhile is read now."""
        assert self._listener is not None, "this kubelet does not run"
        self._server = Server([self])
        await self._server.start(sock=self._listener)

    async def kill(self) -> None:
        """Die: every connection ends, and the socket stays as a file that nobody listens on. Twice is fine."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        asyncio.get_running_loop().remove_reader(listener.fileno())
        if self._server is not None:
            # A server must not be closed under a connection that it is just taking.
            for _ in range(_TURNS):
                await asyncio.sleep(0)
            self._server.close()
            self._server = None
        listener.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._dialled:
            self._dialled.pop().close()
        for connection in listener.accepted:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        # A transport sees the end and closes its socket in the next turns of the loop.
        await self.changes.wait_for(
            lambda: all(connection.fileno() < 0 for connection in listener.accepted), what="connections closed"
        )
        self._forget()
        self.changes.tell()

    async def restart(self, *, sweep: bool = True, bound_s: float = 0.0, deaf: bool = False) -> None:
        """Die and start at once; see `start`."""
        await self.kill()
        await self.start(sweep=sweep, bound_s=bound_s, deaf=deaf)

    def fail(self, fault: Fault, resource: str | None = None) -> None:
        """Do something wrong with every registration from now on: of one resource, or of all."""
        self._faults[resource] = fault

    def mend(self) -> None:
        """Do everything right again from the next registration on."""
        self._faults.clear()

    async def drop_streams(self, resource: str) -> None:
        """End the streams of a resource from the kubelet's side, and draw the consequences."""
        for client in list(self._clients.get(resource, ())):
            self._disconnect(client)
        await asyncio.sleep(0)

    def check(self) -> None:
        """Fail with everything that a plugin did wrong so far.

        Raises: AssertionError.
        """
        assert not self.violations, "the plugin broke the protocol: " + "; ".join(self.violations)

    # What it knows.

    def resources(self) -> frozenset[str]:
        """Every resource in the node's status."""
        return frozenset(resource for resource in self._healthy if not self._is_expired(resource))

    def capacity(self, resource: str) -> int:
        """Return how many devices the node is said to have."""
        if self._is_expired(resource):
            return 0
        return len(self._healthy.get(resource, ())) + len(self._unhealthy.get(resource, ()))

    def allocatable(self, resource: str) -> int:
        """Return how many devices can be handed out."""
        return 0 if self._is_expired(resource) else len(self._healthy.get(resource, ()))

    def healthy(self, resource: str) -> frozenset[str]:
        """Return the ids that can be handed out, booked ones among them."""
        return self._healthy.get(resource, frozenset())

    def unhealthy(self, resource: str) -> frozenset[str]:
        """Return the ids that count towards the capacity only."""
        return self._unhealthy.get(resource, frozenset())

    def device(self, resource: str, device_id: str) -> Device:
        """Return a device as it was listed last.

        Raises: KeyError.
        """
        return self._devices[resource][device_id]

    def is_stopped(self, resource: str) -> bool:
        """Whether requests for the resource fail because nobody is known to serve it."""
        return self.endpoint(resource) is None

    def endpoint(self, resource: str) -> str | None:
        """Return the name of the socket that requests go to; None when nobody is known to serve the resource."""
        client = self._endpoints.get(resource)
        return None if client is None or client.stopped_s is not None else os.path.basename(client.path)

    def streams(self, resource: str) -> int:
        """Return how many ListAndWatch streams are open."""
        return sum(client.resource == resource and client.is_open for client in self._watched)

    def serves(self, resource: str, count: int) -> bool:
        """Whether exactly `count` devices can be handed out, all listed ones, by an endpoint that is not stopped."""
        return (
            not self.is_stopped(resource) and self.allocatable(resource) == count and self.capacity(resource) == count
        )

    def history(self, resource: str) -> list[Received]:
        """Return every list that came in, the oldest first; restarts do not empty it."""
        return self._history.setdefault(resource, [])

    def accepted(self, resource: str) -> list[Attempt]:
        """Return the registrations of a resource that were accepted, the oldest first."""
        return [attempt for attempt in self.attempts if attempt.resource == resource and attempt.is_accepted]

    def booked(self, pod: str | None = None) -> tuple[Booking, ...]:
        """Return what pods hold, or one pod."""
        return tuple(booking for booking in self._bookings.values() if pod in (None, booking.pod))

    async def wait_for(
        self, condition: Callable[[], T], *, timeout_s: float = DEADLINE_S, what: str = "condition"
    ) -> T:
        """Return what `condition` gives as soon as that is true; it may look at more than this kubelet.

        Raises: NotInTime, with the state of the books.
        """
        return await self.changes.wait_for(condition, timeout_s=timeout_s, what=what, state=self.describe)

    def describe(self) -> str:
        """Return the state of the books in a line."""
        known = sorted({*self._healthy, *self._clients, *(attempt.resource for attempt in self.attempts)})
        parts = [
            f"{resource}: {self.allocatable(resource)} of {self.capacity(resource)} allocatable,"
            f" {self.streams(resource)} streams, {len(self.history(resource))} lists,"
            f" {len(self.accepted(resource))} registrations" + (", stopped" if self.is_stopped(resource) else "")
            for resource in known
        ]
        return "kubelet: " + ("; ".join(parts) or "nothing registered")

    # Pods.

    async def allocate(self, pod: str, container: str, resource: str, count: int) -> Booking:
        """Admit a container that asks for `count` devices; one that holds them already keeps them.

        Raises: Refused.
        """
        key = (pod, container, resource)
        held = self._bookings.get(key)
        if held is not None and len(held.ids) != count:
            raise Refused(resource, f"the request of {pod}/{container} changed from {len(held.ids)} to {count}")
        if resource not in self._healthy or self._is_expired(resource):
            raise Refused(resource, f"cannot allocate unregistered device {resource}")
        if not self._healthy[resource]:
            raise Refused(resource, "no healthy devices present; cannot allocate unhealthy devices")
        if held is not None:
            if not self._healthy[resource].issuperset(held.ids):
                raise Refused(resource, "previously allocated devices are no longer healthy")
            return held
        available = self._shuffled(self._healthy[resource] - self._in_use(resource))
        if len(available) < count:
            raise Refused(resource, f"unavailable. Requested: {count}, Available: {len(available)}")
        client = self._endpoints.get(resource)
        if client is None or client.stopped_s is not None:
            raise Refused(resource, f"endpoint {client.path if client else resource} has been stopped")
        try:
            preferred: tuple[str, ...] = ()
            if client.options.get_preferred_allocation_available:
                preferred = await self.preferred(resource, available, (), count)
                self.violations += preference_complaints(available, (), count, preferred)
            chosen = [device_id for device_id in dict.fromkeys(preferred) if device_id in available]
            chosen += [device_id for device_id in available if device_id not in chosen]
            ids = self._shuffled(chosen[:count])
            cdi = await self.grant(resource, ids)
        except _CALL_ENDED as error:
            raise Refused(resource, f"rpc error: {getattr(error, 'message', None) or error}") from error
        booking = Booking(pod, container, resource, ids, cdi)
        self._bookings[key] = booking
        self._write_checkpoint()
        self.changes.tell()
        return booking

    def free(self, pod: str) -> None:
        """Let a pod's devices go, as when it has ended. The plugin is not told: there is no such call."""
        self._bookings = {key: booking for key, booking in self._bookings.items() if booking.pod != pod}
        self._write_checkpoint()

    # Single calls, past the books.

    async def preferred(
        self, resource: str, available: Sequence[str], must_include: Sequence[str], size: int
    ) -> tuple[str, ...]:
        """Call GetPreferredAllocation as it stands.

        Raises: GRPCError.
        """
        container = pb.ContainerPreferredAllocationRequest(
            available_deviceIDs=available, must_include_deviceIDs=must_include, allocation_size=size
        )
        method = UnaryUnaryMethod(
            self._channel(resource),
            _PLUGIN + "GetPreferredAllocation",
            pb.PreferredAllocationRequest,
            pb.PreferredAllocationResponse,
        )
        answer = await method(pb.PreferredAllocationRequest(container_requests=[container]))
        return tuple(answer.container_responses[0].deviceIDs) if answer.container_responses else ()

    async def grant(self, resource: str, ids: Sequence[str]) -> tuple[str, ...]:
        """Call Allocate for one container as it stands; return the CDI names in the answer.

        Raises: GRPCError.
        """
        (answer,) = await self.grants(resource, [ids])
        return answer

    async def grants(self, resource: str, containers: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
        """Call Allocate for several containers in one message; return the CDI names of each.

        Raises: GRPCError.
        """
        method = UnaryUnaryMethod(
            self._channel(resource), _PLUGIN + "Allocate", pb.AllocateRequest, pb.AllocateResponse
        )
        request = pb.AllocateRequest(
            container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
        )
        answer = await method(request)
        if len(answer.container_responses) != len(containers):
            self.violations.append(f"{len(answer.container_responses)} answers to {len(containers)} containers")
        for container in answer.container_responses:
            if container.envs or container.mounts or container.devices or container.annotations:
                self.violations.append("an Allocate answer with more than CDI names")
            names = [device.name for device in container.cdi_devices]
            self.violations += [f"CDI name {name!r}" for name in names if not is_qualified_cdi_name(name)]
        return tuple(tuple(device.name for device in container.cdi_devices) for container in answer.container_responses)

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Call PreStartContainer as it stands.

        Raises: GRPCError.
        """
        method = UnaryUnaryMethod(
            self._channel(resource),
            _PLUGIN + "PreStartContainer",
            pb.PreStartContainerRequest,
            pb.PreStartContainerResponse,
        )
        await method(pb.PreStartContainerRequest(devices_ids=ids))

    # Registration.

    def __mapping__(self) -> dict[str, Handler]:
        """Return the methods for grpclib, by their full path."""
        return {_REGISTER: Handler(self._on_register, Cardinality.UNARY_UNARY, pb.RegisterRequest, pb.Empty)}

    async def _on_register(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message() or pb.RegisterRequest()
        attempt = Attempt(time.monotonic(), request.resource_name, request.endpoint)
        self.attempts.append(attempt)
        fault = self._faults.get(request.resource_name, self._faults.get(None))
        self.changes.tell()
        if fault is Fault.HANG:
            await asyncio.Event().wait()
        # A plugin that gives up does not stop the kubelet.
        error = await asyncio.shield(self._spawn(self._register(request, fault)))
        attempt.answered_s, attempt.error = time.monotonic(), error
        self.changes.tell()
        if error is not None:
            raise GRPCError(Status.UNKNOWN, error)
        await stream.send_message(pb.Empty())

    async def _register(self, request: pb.RegisterRequest, fault: Fault | None) -> str | None:
        """Do what the real one does inside Register; return why not."""
        resource, endpoint = request.resource_name, request.endpoint
        if fault is Fault.REFUSE:
            return "the simulated kubelet refuses"
        if request.version != API_VERSION:
            return (
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{API_VERSION}"]'
            )
        if not is_extended_resource(resource):
            return f'the ResourceName "{resource}" is invalid'
        if not endpoint or "/" in endpoint or endpoint == SOCKET:
            # The real one joins it to the directory, whatever comes of it.
            self.violations.append(f"endpoint {endpoint!r}, expected the name of a socket")
            return f"bad endpoint {endpoint!r}"
        path = str(self.directory / endpoint)
        client = _Client(resource, path, Channel(path=path, config=_WINDOW))
        self._dialled.append(client.channel)
        known = self._clients.setdefault(resource, [])
        if self.generation is Generation.ONE_CLIENT:
            known.clear()
        known.append(client)
        error = await self._connect(client)
        if error is not None:
            self._deregister(client)
            client.channel.close()
            return error
        if request.options != client.options:
            self.violations.append(f"{resource}: options in the registration are not those of the answer")
        self._spawn(self._run(client, fault))
        return None

    async def _connect(self, client: _Client) -> str | None:
        method = UnaryUnaryMethod(client.channel, _PLUGIN + "GetDevicePluginOptions", pb.Empty, pb.DevicePluginOptions)
        try:
            async with asyncio.timeout(self._dial_timeout_s):
                while True:
                    try:
                        client.options = await method(pb.Empty())
                        break
                    except OSError:
                        await asyncio.sleep(_REDIAL_S)
        except TimeoutError:
            return "failed to dial device plugin: context deadline exceeded"
        except _CALL_ENDED as error:
            return f"failed to get device plugin options: {error}"
        if self.generation is Generation.BY_SOCKET:
            store = self._store.setdefault(client.resource, {})
            if client.path in store:
                return f"device plugin already connected: {client.path}"
            store[client.path] = client
        self._endpoints[client.resource] = client
        return None

    async def _run(self, client: _Client, fault: Fault | None) -> None:
        """Watch one client's list until that ends, then draw the consequences."""
        self._watched.append(client)
        try:
            with suppress(*_CALL_ENDED):
                await self._watch(client, fault)
        finally:
            self._watched.remove(client)
        client.channel.close()
        known = self._clients.get(client.resource, [])
        if self.generation is Generation.ONE_CLIENT:
            # Whoever is the newest now is taken for the one that ended.
            ended = known[-1] if known else None
        else:
            ended = next((other for other in known if other.path == client.path), None)
        if ended is not None:
            self._disconnect(ended)
        self.changes.tell()

    async def _watch(self, client: _Client, fault: Fault | None) -> None:
        if fault is Fault.NO_STREAM:
            await asyncio.Event().wait()
        method = UnaryStreamMethod(client.channel, _PLUGIN + "ListAndWatch", pb.Empty, pb.ListAndWatchResponse)
        async with method.open() as stream:
            await stream.send_message(pb.Empty(), end=True)
            client.is_open = True
            self.changes.tell()
            async for message in stream:
                self._receive(client, message)
                if fault is Fault.STOP_READING:
                    await asyncio.Event().wait()
                if fault is Fault.DROP_STREAM:
                    await stream.cancel()
                    return

    def _disconnect(self, client: _Client) -> None:
        resource = client.resource
        self._deregister(client)
        client.channel.close()
        if self.generation is Generation.ONE_CLIENT:
            endpoint = self._endpoints.get(resource)
            if endpoint is not None:
                self._mark_unhealthy(resource)
                endpoint.stopped_s = time.monotonic()
        else:
            store = self._store.get(resource, {})
            if client.path in store:
                store.pop(client.path).stopped_s = time.monotonic()
                if store:
                    self._endpoints[resource] = next(iter(store.values()))
                else:
                    self._mark_unhealthy(resource)
        self.changes.tell()

    def _deregister(self, client: _Client) -> None:
        known = self._clients.get(client.resource, [])
        keep = [] if self.generation is Generation.ONE_CLIENT else [one for one in known if one.path != client.path]
        self._clients[client.resource] = keep

    def _mark_unhealthy(self, resource: str) -> None:
        self._unhealthy[resource] = self.unhealthy(resource) | self.healthy(resource)
        self._healthy[resource] = frozenset()

    def _receive(self, client: _Client, message: pb.ListAndWatchResponse) -> None:
        resource = client.resource
        self.violations += [f"{resource}: {complaint}" for complaint in complaints(message)]
        received = Received(time.monotonic(), os.path.basename(client.path), devices(message))
        self.history(resource).append(received)
        self._devices[resource] = {device.id: device for device in received.devices}
        self._healthy[resource] = received.healthy
        self._unhealthy[resource] = received.unhealthy
        self._write_checkpoint()
        self.on_list(resource, received)
        self.changes.tell()

    # The rest of the books.

    def _forget(self) -> None:
        """Lose what a process has in memory."""
        self._clients.clear()
        self._endpoints.clear()
        self._store.clear()
        self._stopped_s.clear()
        self._devices.clear()
        self._healthy.clear()
        self._unhealthy.clear()
        self._bookings.clear()

    def _channel(self, resource: str) -> Channel:
        client = self._endpoints.get(resource)
        assert client is not None, f"nobody serves {resource}"
        assert client.stopped_s is None, f"who served {resource} has stopped"
        return client.channel

    def _is_expired(self, resource: str) -> bool:
        client = self._endpoints.get(resource)
        stopped_s = self._stopped_s.get(resource) if client is None else client.stopped_s
        return stopped_s is not None and time.monotonic() - stopped_s > self._stop_grace_s

    def _in_use(self, resource: str) -> set[str]:
        return {
            device_id
            for booking in self._bookings.values()
            if booking.resource == resource
            for device_id in booking.ids
        }

    def _shuffled(self, ids: Iterable[str]) -> tuple[str, ...]:
        ordered = sorted(ids)
        self._random.shuffle(ordered)
        return tuple(ordered)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _sweep(self) -> None:
        for path in self.directory.iterdir():
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.stat().st_mode):
                    path.unlink()

    def _write_checkpoint(self) -> None:
        """Write the books beside the sockets, in the real one's way: every list causes events in that directory."""
        data = {
            "PodDeviceEntries": [
                [booking.pod, booking.container, booking.resource, booking.ids, booking.cdi]
                for booking in self._bookings.values()
            ],
            "RegisteredDevices": {resource: sorted(ids) for resource, ids in self._healthy.items()},
        }
        temporary = self.directory / f".{CHECKPOINT}{os.getpid()}"
        with suppress(FileNotFoundError):
            temporary.write_text(json.dumps(data))
            temporary.rename(self.directory / CHECKPOINT)

    def _read_checkpoint(self) -> None:
        try:
            data = json.loads((self.directory / CHECKPOINT).read_text())
        except FileNotFoundError:
            return
        for pod, container, resource, ids, cdi in data["PodDeviceEntries"]:
            self._bookings[pod, container, resource] = Booking(pod, container, resource, tuple(ids), tuple(cdi))
        for resource in data["RegisteredDevices"]:
            self._healthy[resource] = self._unhealthy[resource] = frozenset()
            self._endpoints[resource] = None
            self._stopped_s[resource] = time.monotonic()
