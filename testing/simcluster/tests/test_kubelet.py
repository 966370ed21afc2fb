# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The simulated kubelet against a plugin that does as it is told: what a real one would do, and what ours objects to."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import StreamTerminatedError
from grpclib.server import Server, Stream

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb
from simcluster.kubelet import Fault, Generation, Kubelet, Refused
from simcluster.waiting import NotInTime, wait_for

GPU = "example.com/gpu"
HEALTHY, UNHEALTHY = "Healthy", "Unhealthy"
OPTIONS = pb.DevicePluginOptions(get_preferred_allocation_available=True)

both = pytest.mark.parametrize("generation", list(Generation))


class Script:
    """A plugin on one socket. What it lists and answers is what the test sets."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.endpoint = name
        self.options = OPTIONS
        self.prefer: Callable[[list[str], int], list[str]] = lambda available, size: sorted(available)[:size]
        self.grant: Callable[[str], str] = lambda device_id: f"{GPU}={device_id}"
        self.error: GRPCError | None = None
        self.calls: list[str] = []
        self._list = pb.ListAndWatchResponse()
        self._watchers: list[asyncio.Event] = []
        self._ending = asyncio.Event()

    def show(self, health: Mapping[str, str], numa: Iterable[int] | None = None) -> None:
        """List these devices from now on."""
        topology = None if numa is None else pb.TopologyInfo(nodes=[pb.NUMANode(ID=node) for node in numa])
        self.show_raw(pb.Device(ID=device, health=word, topology=topology) for device, word in health.items())

    def show_raw(self, devices: Iterable[pb.Device]) -> None:
        self._list = pb.ListAndWatchResponse(devices=devices)
        for watcher in self._watchers:
            watcher.set()

    def end_streams(self) -> None:
        self._ending.set()
        for watcher in self._watchers:
            watcher.set()

    async def register(self, resource: str = GPU, *, version: str = "v1beta1", endpoint: str | None = None) -> None:
        async with Channel(path=str(self.directory / "kubelet.sock")) as channel:
            method = UnaryUnaryMethod(channel, "/v1beta1.Registration/Register", pb.RegisterRequest, pb.Empty)
            name = self.endpoint if endpoint is None else endpoint
            await method(
                pb.RegisterRequest(version=version, endpoint=name, resource_name=resource, options=self.options)
            )

    def __mapping__(self) -> dict[str, Handler]:
        def unary(name: str, method: Any, request: Any, answer: Any) -> tuple[str, Handler]:
            return f"/v1beta1.DevicePlugin/{name}", Handler(method, Cardinality.UNARY_UNARY, request, answer)

        return dict(
            [
                unary("GetDevicePluginOptions", self._options, pb.Empty, pb.DevicePluginOptions),
                unary(
                    "GetPreferredAllocation",
                    self._preferred,
                    pb.PreferredAllocationRequest,
                    pb.PreferredAllocationResponse,
                ),
                unary("Allocate", self._allocate, pb.AllocateRequest, pb.AllocateResponse),
                (
                    "/v1beta1.DevicePlugin/ListAndWatch",
                    Handler(self._watch, Cardinality.UNARY_STREAM, pb.Empty, pb.ListAndWatchResponse),
                ),
            ]
        )

    async def _options(self, stream: Stream[Any, Any]) -> None:
        self.calls.append("options")
        await stream.recv_message()
        await stream.send_message(OPTIONS)

    async def _watch(self, stream: Stream[Any, Any]) -> None:
        self.calls.append("watch")
        await stream.recv_message()
        changed = asyncio.Event()
        self._watchers.append(changed)
        while not self._ending.is_set():
            changed.clear()
            await stream.send_message(self._list)
            await changed.wait()

    async def _preferred(self, stream: Stream[Any, Any]) -> None:
        self.calls.append("preferred")
        message = await stream.recv_message()
        assert message is not None
        (request,) = message.container_requests
        ids = self.prefer(list(request.available_deviceIDs), request.allocation_size)
        answer = pb.ContainerPreferredAllocationResponse(deviceIDs=ids)
        await stream.send_message(pb.PreferredAllocationResponse(container_responses=[answer]))

    async def _allocate(self, stream: Stream[Any, Any]) -> None:
        self.calls.append("allocate")
        message = await stream.recv_message()
        assert message is not None
        (request,) = message.container_requests
        if self.error is not None:
            raise self.error
        answer = pb.ContainerAllocateResponse(
            cdi_devices=[pb.CDIDevice(name=self.grant(device)) for device in request.devices_ids]
        )
        await stream.send_message(pb.AllocateResponse(container_responses=[answer]))


@asynccontextmanager
async def serving(directory: Path, name: str = "plugin.sock") -> AsyncIterator[Script]:
    script = Script(directory, name)
    server = Server([script])
    await server.start(path=str(directory / name))
    try:
        yield script
    finally:
        script.end_streams()
        server.close()
        # Not wait_closed(): since Python 3.12 it waits for every client to hang up first.
        await asyncio.sleep(0)


@asynccontextmanager
async def registered(directory: Path, health: Mapping[str, str]) -> AsyncIterator[tuple[Kubelet, Script]]:
    async with Kubelet(directory) as kubelet, serving(directory) as script:
        script.show(health)
        await script.register()
        await kubelet.wait_for(lambda: kubelet.history(GPU))
        yield kubelet, script


async def refused(call: Any) -> str:
    with pytest.raises(GRPCError) as caught:
        await call
    assert caught.value.status is Status.UNKNOWN
    return str(caught.value.message)


async def test_a_registration_is_dialled_back_before_it_is_answered(directory: Path) -> None:
    async with Kubelet(directory) as kubelet, serving(directory) as script:
        await script.register()
        assert script.calls[0] == "options"
        await kubelet.wait_for(lambda: kubelet.streams(GPU) == 1)
        (attempt,) = kubelet.accepted(GPU)
        assert attempt.endpoint == "plugin.sock"


async def test_only_the_exact_word_is_healthy(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY, "b": UNHEALTHY}) as (kubelet, script):
        assert (kubelet.capacity(GPU), kubelet.allocatable(GPU)) == (2, 1)
        script.show({"a": "healthy", "b": HEALTHY})
        await kubelet.wait_for(lambda: "b" in kubelet.healthy(GPU))
        assert kubelet.unhealthy(GPU) == {"a"}
        with pytest.raises(AssertionError, match="health 'healthy'"):
            kubelet.check()
        kubelet.violations.clear()


async def test_each_list_replaces_the_one_before_it_and_all_are_kept(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY, "b": HEALTHY}) as (kubelet, script):
        before = time.monotonic()
        script.show({"c": HEALTHY})
        await kubelet.wait_for(lambda: len(kubelet.history(GPU)) == 2)
        assert [received.ids for received in kubelet.history(GPU)] == [("a", "b"), ("c",)]
        assert kubelet.history(GPU)[0].at_s < before <= kubelet.history(GPU)[1].at_s
        script.show({})
        await kubelet.wait_for(lambda: kubelet.capacity(GPU) == 0)
        assert kubelet.resources() == {GPU}


@pytest.mark.parametrize(
    ("resource", "version", "endpoint", "says"),
    [
        (GPU, "v1beta2", None, 'requested API version "v1beta2" is not supported'),
        ("gpu", "v1beta1", None, 'the ResourceName "gpu" is invalid'),
        ("kubernetes.io/gpu", "v1beta1", None, "is invalid"),
        ("example.com/" + "g" * 64, "v1beta1", None, "is invalid"),
        (GPU, "v1beta1", "absent.sock", "failed to dial"),
    ],
)
async def test_a_bad_registration_is_answered_with_the_reason(
    resource: str, version: str, endpoint: str | None, says: str, directory: Path
) -> None:
    async with Kubelet(directory, dial_timeout_s=0.05) as kubelet, serving(directory) as script:
        assert says in await refused(script.register(resource, version=version, endpoint=endpoint))
        assert kubelet.attempts[0].error is not None
        assert kubelet.capacity(resource) == 0


@pytest.mark.parametrize("endpoint", ["", "a/b.sock", "kubelet.sock"])
async def test_an_endpoint_that_is_no_base_name_is_a_violation(endpoint: str, directory: Path) -> None:
    async with Kubelet(directory) as kubelet, serving(directory) as script:
        await refused(script.register(endpoint=endpoint))
        assert kubelet.violations
        kubelet.violations.clear()


async def test_a_plugin_that_does_not_answer_inside_the_registration_is_given_up_on(directory: Path) -> None:
    async with Kubelet(directory, dial_timeout_s=0.05) as kubelet:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "mute.sock"))
            listener.listen()
            assert "deadline exceeded" in await refused(Script(directory, "mute.sock").register())
        assert kubelet.is_stopped(GPU)


@pytest.mark.parametrize(
    ("devices", "complaint"),
    [
        ([pb.Device(ID="a", health=HEALTHY)] * 2, "stands 2 times"),
        ([pb.Device(ID="", health=HEALTHY)], "expected 1 to 63 characters"),
        ([pb.Device(ID="a" * 64, health=HEALTHY)], "expected 1 to 63 characters"),
        ([pb.Device(ID="a", health=HEALTHY, topology=pb.TopologyInfo())], "topology without a node"),
        ([pb.Device(ID="a", health=HEALTHY, topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=-1)]))], "NUMA node -1"),
        ([pb.Device(ID="a", health=HEALTHY, topology=pb.TopologyInfo(nodes=[pb.NUMANode(ID=64)]))], "NUMA node 64"),
    ],
)
async def test_what_a_real_kubelet_swallows_is_a_violation(
    devices: list[pb.Device], complaint: str, directory: Path
) -> None:
    async with registered(directory, {}) as (kubelet, script):
        script.show_raw(devices)
        await kubelet.wait_for(lambda: len(kubelet.history(GPU)) == 2)
        with pytest.raises(AssertionError, match=complaint):
            kubelet.check()
        kubelet.violations.clear()


async def test_options_that_differ_from_the_registration_are_a_violation(directory: Path) -> None:
    async with Kubelet(directory) as kubelet, serving(directory) as script:
        script.options = pb.DevicePluginOptions(pre_start_required=True)
        await script.register()
        assert kubelet.violations
        kubelet.violations.clear()


@both
async def test_the_end_of_the_stream_makes_everything_unhealthy_and_stops_the_endpoint(
    generation: Generation, directory: Path
) -> None:
    async with Kubelet(directory, generation=generation) as kubelet, serving(directory) as script:
        script.show({"a": HEALTHY, "b": HEALTHY})
        await script.register()
        await kubelet.wait_for(lambda: kubelet.serves(GPU, 2))
        script.end_streams()
        await kubelet.wait_for(lambda: kubelet.is_stopped(GPU))
        assert (kubelet.capacity(GPU), kubelet.allocatable(GPU)) == (2, 0)
        with pytest.raises(Refused, match="no healthy devices"):
            await kubelet.allocate("pod", "main", GPU, 1)


async def test_a_resource_that_nobody_serves_leaves_the_node_after_the_grace_period(directory: Path) -> None:
    async with Kubelet(directory, stop_grace_s=0.05) as kubelet, serving(directory) as script:
        script.show({"a": HEALTHY})
        await script.register()
        await kubelet.wait_for(lambda: kubelet.serves(GPU, 1))
        script.end_streams()
        await kubelet.wait_for(lambda: kubelet.is_stopped(GPU))
        await kubelet.wait_for(lambda: GPU not in kubelet.resources())
        assert kubelet.capacity(GPU) == 0


@both
@pytest.mark.parametrize("ends", ["old", "new"])
async def test_two_instances_overlap_as_they_do_on_each_kubelet(
    generation: Generation, ends: str, directory: Path
) -> None:
    async with (
        Kubelet(directory, generation=generation) as kubelet,
        serving(directory, "old.sock") as old,
        serving(directory, "new.sock") as new,
    ):
        for script in (old, new):
            script.show({"a": HEALTHY})
            await script.register()
        await kubelet.wait_for(lambda: len(kubelet.history(GPU)) == 2 and kubelet.streams(GPU) == 2)
        (old if ends == "old" else new).end_streams()
        await kubelet.wait_for(lambda: kubelet.streams(GPU) < 2)
        if generation is Generation.BY_SOCKET:
            assert kubelet.serves(GPU, 1)
            assert kubelet.streams(GPU) == 1
        else:
            await kubelet.wait_for(lambda: kubelet.is_stopped(GPU))
            assert kubelet.allocatable(GPU) == 0
            # The older one's end takes the newer one's connection along; the other way round the older one stays open
            # and is not asked any more.
            await kubelet.wait_for(lambda: kubelet.streams(GPU) == (0 if ends == "old" else 1))


async def test_a_socket_that_is_connected_already_is_refused_by_newer_kubelets(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        assert "already connected" in await refused(script.register())
        # The connection is forgotten all the same, as in the real one: its end goes unnoticed.
        script.end_streams()
        await kubelet.wait_for(lambda: kubelet.streams(GPU) == 0)
        assert not kubelet.is_stopped(GPU)


async def test_older_kubelets_take_a_socket_again(directory: Path) -> None:
    async with Kubelet(directory, generation=Generation.ONE_CLIENT) as kubelet, serving(directory) as script:
        await script.register()
        await script.register()
        assert len(kubelet.accepted(GPU)) == 2


async def test_pods_get_different_devices_and_keep_them(directory: Path) -> None:
    async with registered(directory, dict.fromkeys("abcd", HEALTHY)) as (kubelet, script):
        first = await kubelet.allocate("first", "main", GPU, 2)
        assert sorted(first.ids) == ["a", "b"]
        assert sorted(first.cdi) == [f"{GPU}=a", f"{GPU}=b"]
        assert script.calls[-2:] == ["preferred", "allocate"]
        second = await kubelet.allocate("second", "main", GPU, 2)
        assert sorted(second.ids) == ["c", "d"]
        with pytest.raises(Refused, match="Requested: 1, Available: 0"):
            await kubelet.allocate("third", "main", GPU, 1)
        asked = len(script.calls)
        assert await kubelet.allocate("first", "main", GPU, 2) == first
        assert len(script.calls) == asked
        kubelet.free("first")
        assert set((await kubelet.allocate("third", "main", GPU, 2)).ids) == {"a", "b"}


async def test_a_pod_is_refused_as_on_a_real_node(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        with pytest.raises(Refused, match="unregistered"):
            await kubelet.allocate("pod", "main", "example.com/other", 1)
        await kubelet.allocate("pod", "main", GPU, 1)
        with pytest.raises(Refused, match="changed from 1 to 2"):
            await kubelet.allocate("pod", "main", GPU, 2)
        script.show({"a": UNHEALTHY, "b": HEALTHY})
        await kubelet.wait_for(lambda: "b" in kubelet.healthy(GPU))
        with pytest.raises(Refused, match="no longer healthy"):
            await kubelet.allocate("pod", "main", GPU, 1)
        script.error = GRPCError(Status.NOT_FOUND, "no such device")
        with pytest.raises(Refused, match="no such device"):
            await kubelet.allocate("other", "main", GPU, 1)
        assert {booking.pod for booking in kubelet.booked()} == {"pod"}


@pytest.mark.parametrize("answer", [[], ["a"], ["a", "a"], ["a", "z"]])
async def test_a_bad_preference_is_made_up_for_and_is_a_violation(answer: list[str], directory: Path) -> None:
    async with registered(directory, dict.fromkeys("abc", HEALTHY)) as (kubelet, script):
        script.prefer = lambda *_: answer
        assert len(set((await kubelet.allocate("pod", "main", GPU, 2)).ids)) == 2
        assert kubelet.violations
        kubelet.violations.clear()


@pytest.mark.parametrize("name", ["gpu=a", "example.com/gpu", "example.com/gpu=", "example.com/gpu=a=b"])
async def test_a_name_that_no_cdi_reader_takes_is_a_violation(name: str, directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        script.grant = lambda _: name
        await kubelet.allocate("pod", "main", GPU, 1)
        assert kubelet.violations
        kubelet.violations.clear()


async def test_a_restart_removes_every_socket_keeps_the_rest_and_remembers_the_bookings(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        booking = await kubelet.allocate("pod", "main", GPU, 1)
        (directory / "file.sock").write_text("not a socket")
        before = os.stat(kubelet.socket)
        await kubelet.restart()
        assert (os.stat(kubelet.socket).st_ino, os.stat(kubelet.socket).st_ctime_ns) != (
            before.st_ino,
            before.st_ctime_ns,
        )
        assert not (directory / script.endpoint).exists()
        assert (directory / "file.sock").exists()
        assert kubelet.booked() == (booking,)
        assert (kubelet.capacity(GPU), kubelet.is_stopped(GPU)) == (0, True)
        assert len(kubelet.history(GPU)) == 1
        with pytest.raises(Refused, match="no healthy devices"):
            await kubelet.allocate("pod", "main", GPU, 1)


async def test_a_restart_can_leave_the_other_sockets_alone(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        await kubelet.restart(sweep=False)
        assert (directory / script.endpoint).is_socket()
        await script.register()
        await kubelet.wait_for(lambda: kubelet.serves(GPU, 1))


async def test_a_killed_kubelet_leaves_a_socket_that_nobody_listens_on(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, script):
        await kubelet.kill()
        await kubelet.kill()
        assert kubelet.socket.is_socket()
        with pytest.raises(ConnectionRefusedError):
            await script.register()


async def test_a_socket_can_be_there_before_it_listens(directory: Path) -> None:
    kubelet = Kubelet(directory)
    starting = asyncio.ensure_future(kubelet.start(bound_s=0.1))
    await wait_for(kubelet.socket.exists)
    script = Script(directory, "plugin.sock")
    with pytest.raises(ConnectionRefusedError):
        await script.register()
    await starting
    async with serving(directory) as served:
        await served.register()
    await kubelet.kill()


async def test_a_deaf_kubelet_takes_a_call_and_answers_when_it_hears(directory: Path) -> None:
    kubelet = Kubelet(directory)
    await kubelet.start(deaf=True)
    async with serving(directory) as script:
        call = asyncio.ensure_future(script.register())
        with pytest.raises(NotInTime):
            await kubelet.wait_for(call.done, timeout_s=0.05)
        await kubelet.hear()
        await call
        assert kubelet.accepted(GPU)
        await kubelet.kill()


async def test_it_answers_with_an_error_for_one_resource_only_and_until_it_is_mended(directory: Path) -> None:
    async with Kubelet(directory) as kubelet, serving(directory) as script:
        kubelet.fail(Fault.REFUSE, GPU)
        await refused(script.register())
        await script.register("example.com/other")
        kubelet.mend()
        await script.register()
        assert [attempt.is_accepted for attempt in kubelet.attempts] == [False, True, True]


async def test_it_hangs_in_the_registration(directory: Path) -> None:
    async with serving_after_kubelet(directory) as (kubelet, script):
        kubelet.fail(Fault.HANG)
        call = asyncio.ensure_future(script.register())
        await kubelet.wait_for(lambda: kubelet.attempts)
        assert not call.done()
        await kubelet.kill()
        with pytest.raises(StreamTerminatedError):
            await call


async def test_it_never_opens_the_stream(directory: Path) -> None:
    async with serving_after_kubelet(directory) as (kubelet, script):
        kubelet.fail(Fault.NO_STREAM)
        await script.register()
        assert (kubelet.streams(GPU), script.calls) == (0, ["options"])


async def test_it_closes_the_stream_after_the_first_list(directory: Path) -> None:
    async with serving_after_kubelet(directory) as (kubelet, script):
        kubelet.fail(Fault.DROP_STREAM)
        script.show({"a": HEALTHY})
        await script.register()
        await kubelet.wait_for(lambda: kubelet.history(GPU) and kubelet.is_stopped(GPU))
        assert len(kubelet.history(GPU)) == 1


async def test_it_stops_reading_after_the_first_list(directory: Path) -> None:
    async with serving_after_kubelet(directory) as (kubelet, script):
        kubelet.fail(Fault.STOP_READING)
        script.show({"a": HEALTHY})
        await script.register()
        await kubelet.wait_for(lambda: kubelet.history(GPU))
        script.show({"b": HEALTHY})
        with pytest.raises(NotInTime, match="1 lists"):
            await kubelet.wait_for(lambda: len(kubelet.history(GPU)) > 1, timeout_s=0.05)
        assert kubelet.streams(GPU) == 1


async def test_it_ends_streams_when_told_to(directory: Path) -> None:
    async with registered(directory, {"a": HEALTHY}) as (kubelet, _):
        await kubelet.drop_streams(GPU)
        await kubelet.wait_for(lambda: kubelet.streams(GPU) == 0)
        assert kubelet.is_stopped(GPU)


@asynccontextmanager
async def serving_after_kubelet(directory: Path) -> AsyncIterator[tuple[Kubelet, Script]]:
    async with AsyncExitStack() as stack:
        kubelet = await stack.enter_async_context(Kubelet(directory))
        yield kubelet, await stack.enter_async_context(serving(directory))
