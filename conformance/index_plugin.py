# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A device plugin with the mistake that this product exists to avoid: ids that count the present devices.

It takes the plugin's path flags and serves nvidia.com/gpu with ids "0", "1", ... over the bound functions in order of
address. When a function goes, every id behind it means another device. The random sequence must find that out.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any, Final

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.server import Server, Stream

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb

_KIND: Final = "nvidia.com/gpu"
_POLL_S: Final = 0.005


class IndexPlugin:
    def __init__(self, sysfs: Path, dev_vfio: Path, plugin_dir: Path, cdi_dir: Path) -> None:
        self._sysfs = sysfs
        self._dev_vfio = dev_vfio
        self._plugin_dir = plugin_dir
        self._cdi_dir = cdi_dir
        self._nodes: tuple[str, ...] = ()
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        server = Server([self])
        await server.start(path=str(self._plugin_dir / "index.sock"))
        registered = False
        while True:
            nodes = self._present()
            if nodes != self._nodes:
                async with self._changed:
                    self._nodes = nodes
                    self._write()
                    self._changed.notify_all()
            if nodes and not registered:
                await self._register()
                registered = True
            await asyncio.sleep(_POLL_S)

    def _present(self) -> tuple[str, ...]:
        found = []
        for entry in (self._sysfs / "class" / "vfio-dev").glob("vfio*"):
            node = self._dev_vfio / "devices" / entry.name
            function = Path(os.path.realpath(entry / "device"))
            try:
                is_gpu = (function / "class").read_text().startswith("0x0302")
            except FileNotFoundError:
                continue
            if is_gpu and node.exists():
                found.append((function.name, str(node)))
        return tuple(node for _, node in sorted(found))

    def _write(self) -> None:
        devices = [
            {"name": str(index), "containerEdits": {"deviceNodes": [{"path": node, "type": "c", "permissions": "rw"}]}}
            for index, node in enumerate(self._nodes)
        ]
        self._cdi_dir.mkdir(exist_ok=True)
        temporary = self._cdi_dir / ".index.tmp"
        temporary.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": _KIND, "devices": devices}))
        temporary.rename(self._cdi_dir / "index.json")

    async def _register(self) -> None:
        channel = Channel(path=str(self._plugin_dir / "kubelet.sock"))
        method = UnaryUnaryMethod(channel, "/v1beta1.Registration/Register", pb.RegisterRequest, pb.Empty)
        await method(pb.RegisterRequest(version="v1beta1", endpoint="index.sock", resource_name=_KIND))
        channel.close()

    def __mapping__(self) -> dict[str, Handler]:
        service = "/v1beta1.DevicePlugin/"
        unary, streaming = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            service + "GetDevicePluginOptions": Handler(self._options, unary, pb.Empty, pb.DevicePluginOptions),
            service + "ListAndWatch": Handler(self._list, streaming, pb.Empty, pb.ListAndWatchResponse),
            service + "Allocate": Handler(self._allocate, unary, pb.AllocateRequest, pb.AllocateResponse),
        }

    async def _options(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(pb.DevicePluginOptions())

    async def _list(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        async with self._changed:
            while True:
                devices = [pb.Device(ID=str(index), health="Healthy") for index in range(len(self._nodes))]
                await stream.send_message(pb.ListAndWatchResponse(devices=devices))
                await self._changed.wait()

    async def _allocate(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message() or pb.AllocateRequest()
        await stream.send_message(
            pb.AllocateResponse(
                container_responses=[
                    pb.ContainerAllocateResponse(
                        cdi_devices=[pb.CDIDevice(name=f"{_KIND}={index}") for index in container.devices_ids]
                    )
                    for container in request.container_requests
                ]
            )
        )


def main(arguments: list[str]) -> None:
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    paths = (Path(flags[name]) for name in ("sysfs", "dev-vfio", "device-plugin-dir", "cdi-dir"))
    asyncio.run(IndexPlugin(*paths).run())


if __name__ == "__main__":
    main(sys.argv[1:])
