# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What the kubelet takes in of a resource: a list, judged as strictly as the protocol allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kata_device_plugin.v1beta1 import deviceplugin_pb2 as pb

HEALTHY: Final = "Healthy"
UNHEALTHY: Final = "Unhealthy"

# Source: k8s.io/kubelet pkg/apis/deviceplugin/v1beta1/api.proto, comment on Device.ID
_ID_LIMIT: Final = 63
# Source: k8s.io/kubernetes pkg/kubelet/cm/topologymanager/bitmask refuses bits above 63
_NODE_LIMIT: Final = 63


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a list. `numa` is empty when the plugin says nothing of topology."""

    id: str
    health: str
    numa: tuple[int, ...] = ()

    @property
    def is_healthy(self) -> bool:
        """Whether the kubelet hands it out: only the exact word counts."""
        return self.health == HEALTHY


@dataclass(frozen=True, slots=True)
class Received:
    """One message of a ListAndWatch stream.

    `at_s` is time.monotonic(). `endpoint` is the base name of the socket that it came through.
    """

    at_s: float
    endpoint: str
    devices: tuple[Device, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Every id, in the order of the message."""
        return tuple(device.id for device in self.devices)

    @property
    def healthy(self) -> frozenset[str]:
        """The ids that can be handed out."""
        return frozenset(device.id for device in self.devices if device.is_healthy)

    @property
    def unhealthy(self) -> frozenset[str]:
        """The ids that can't."""
        return frozenset(device.id for device in self.devices if not device.is_healthy)

    def device(self, device_id: str) -> Device:
        """Return one device.

        Raises: KeyError.
        """
        for device in self.devices:
            if device.id == device_id:
                return device
        raise KeyError(device_id)


def devices(message: pb.ListAndWatchResponse) -> tuple[Device, ...]:
    """Return the devices of a message, in its order."""
    return tuple(
        Device(
            device.ID,
            device.health,
            tuple(node.ID for node in device.topology.nodes) if device.HasField("topology") else (),
        )
        for device in message.devices
    )


def complaints(message: pb.ListAndWatchResponse) -> Iterator[str]:
    """Name what a kubelet would swallow and a node would suffer from."""
    for device_id, count in Counter(device.ID for device in message.devices).items():
        if count > 1:
            yield f"device {device_id!r} stands {count} times in one list"
    for device in message.devices:
        if not device.ID or len(device.ID) > _ID_LIMIT:
            yield f"device id {device.ID!r}: expected 1 to {_ID_LIMIT} characters"
        if device.health not in (HEALTHY, UNHEALTHY):
            yield f"device {device.ID}: health {device.health!r}, expected {HEALTHY} or {UNHEALTHY}"
        if device.HasField("topology"):
            if not device.topology.nodes:
                yield f"device {device.ID}: topology without a node"
            for node in device.topology.nodes:
                if not 0 <= node.ID <= _NODE_LIMIT:
                    yield f"device {device.ID}: NUMA node {node.ID}"


def preference_complaints(
    available: Sequence[str], must_include: Sequence[str], size: int, answer: Sequence[str]
) -> Iterator[str]:
    """Name what is wrong with an answer to GetPreferredAllocation."""
    if len(answer) != size:
        yield f"preferred {len(answer)} devices, expected {size}"
    if len(set(answer)) != len(answer):
        yield f"preferred a device twice: {list(answer)}"
    if missing := set(must_include) - set(answer):
        yield f"preferred without the fixed {sorted(missing)}"
    if strangers := set(answer) - set(available):
        yield f"preferred {sorted(strangers)}, not among the available"
