# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""The kubelet's own device manager in a child process, in a mount namespace of its own.

What is real: device manager, topology manager, pod-resources service and checkpoint code of that Kubernetes release,
its sockets and its files. What is not: there is no API server, no container runtime and no scheduler; the test says
which pods there are.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from conformance.json_lines import JsonLines

# A mount namespace hides the machine's own /var/lib, so nothing there is needed or touched. The kubelet's directory is
# the one path that must be where the kubelet has it compiled in.
_ENTER: Final = (
    "mount -t tmpfs -o size=1m tmpfs /var/lib && mkdir /var/lib/kubelet && "
    'mount --bind "$1" /var/lib/kubelet && exec "$2" -v=2'
)
SETTLE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the kubelet is told of it: how many devices of each resource each container asks for."""

    uid: str
    containers: Mapping[str, Mapping[str, int]]
    running: bool = False

    @classmethod
    def of(cls, uid: str, **resources: int) -> Self:
        """Return a pod of one container, `main`; write nvidia.com/gpu as gpu."""
        return cls(uid, {"main": {f"nvidia.com/{name}": count for name, count in resources.items()}})

    def as_json(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "name": f"pod-{self.uid}",
            "namespace": "default",
            "containers": [
                {"name": name, "resources": dict(wanted), "running": self.running}
                for name, wanted in self.containers.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Given:
    """What the container runtime is handed for one container, and the ids that the kubelet booked for it."""

    ids: Mapping[str, tuple[str, ...]]
    cdi: tuple[str, ...]
    envs: Mapping[str, str]
    annotations: Mapping[str, str]
    devices: tuple[str, ...]
    mounts: tuple[str, ...]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> Self:
        return cls(
            ids={resource: tuple(ids) for resource, ids in answer["device_ids"].items()},
            cdi=tuple(answer["cdi"]),
            envs=answer["envs"],
            annotations=answer["annotations"],
            devices=tuple(answer["devices"]),
            mounts=tuple(answer["mounts"]),
        )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the node status would say."""

    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """What the manager holds of one resource."""

    healthy: tuple[str, ...] = ()
    unhealthy: tuple[str, ...] = ()
    allocated: tuple[str, ...] = ()
    numa: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    at_ns: int = 0
    """When it was so (CLOCK_MONOTONIC), if it was waited for."""

    @classmethod
    def from_json(cls, answer: Mapping[str, Any], at_ns: int = 0) -> Self:
        return cls(
            tuple(answer["healthy"]),
            tuple(answer["unhealthy"]),
            tuple(answer["allocated"]),
            {device: tuple(nodes) for device, nodes in answer["numa"].items()},
            at_ns,
        )


@dataclass(frozen=True, slots=True)
class Booking:
    """One entry of the checkpoint."""

    pod: str
    container: str
    resource: str
    ids: tuple[str, ...]
    cdi: tuple[str, ...]


class Kubelet:
    """One node's kubelet, as a process that can be killed and come back. `state` stands at /var/lib/kubelet."""

    def __init__(self, binary: Path, state: Path, *, release: str) -> None:
        self.release = release
        self.state = state
        self.plugin_dir = state / "device-plugins"
        self._binary = binary
        self._log = state.parent / "kubelet.log"
        self._pods: dict[str, Pod] = {}
        self._options: dict[str, Any] = {}
        self._process = self._spawn()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()

    def _spawn(self) -> JsonLines:
        inside = ["sh", "-c", _ENTER, "sh", str(self.state), str(self._binary)]
        return JsonLines(
            ["unshare", "--mount", "--propagation", "private", "--", *inside],
            name=f"kubelet {self.release}",
            log=self._log,
        )

    # Life.

    def start(self, *, numa_nodes: int = 2, policy: str = "none", scope: str = "container") -> int:
        """Start the manager; return when registration was served (CLOCK_MONOTONIC, ns)."""
        self._options = {"numa_nodes": numa_nodes, "policy": policy, "scope": scope}
        return self._start()

    def _start(self) -> int:
        answer = self._process.ask("start", pods=[pod.as_json() for pod in self._pods.values()], **self._options)
        return int(answer["monotonic_ns"])

    def stop(self) -> None:
        """Stop the manager; its process stays."""
        self._process.ask("stop")

    def restart(self) -> int:
        """Stop and start in the same process; return when registration was served again."""
        self.stop()
        return self._start()

    def kill(self) -> None:
        """Kill the process as `kill -9` does; its socket file stays."""
        self._process.kill()

    def come_back(self) -> int:
        """Start again as a new process after `kill`, knowing the pods that were active."""
        self._process = self._spawn()
        return self._start()

    def version(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._process.ask("version")
        return answer

    def schema(self) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = self._process.ask("schema")
        return answer

    # State.

    def capacity(self) -> Capacity:
        answer = self._process.ask("capacity")
        return Capacity(answer["capacity"], answer["allocatable"], tuple(answer["removed"]))

    def devices(self, resource: str) -> Held:
        """Return what the manager holds of a resource; nothing when it knows none."""
        answer = self._process.ask("devices")
        return Held.from_json(answer[resource]) if resource in answer else Held()

    def wait(
        self,
        resource: str,
        *,
        healthy: int | Collection[str] | None = None,
        unhealthy: int | Collection[str] | None = None,
        within_s: float = SETTLE_S,
    ) -> Held:
        """Wait until the manager holds these sets, or so many.

        Raises: Refused when it does not in time.
        """
        wanted = {
            name: value if isinstance(value, int) else sorted(value)
            for name, value in (("healthy", healthy), ("unhealthy", unhealthy))
            if value is not None
        }
        answer = self._process.ask(
            "wait", resource=resource, timeout_ms=int(within_s * 1000), within_s=within_s + 10, **wanted
        )
        return Held.from_json(answer["devices"], answer["monotonic_ns"])

    def checkpoint(self) -> tuple[Booking, ...]:
        """Read the checkpoint with the kubelet's code.

        Raises: Refused when there is none or its checksum is wrong.
        """
        return tuple(
            Booking(
                entry["pod_uid"], entry["container"], entry["resource"], tuple(entry["device_ids"]), tuple(entry["cdi"])
            )
            for entry in self._process.ask("checkpoint")["pods"]
        )

    # Pods.

    def allocate(self, pod: Pod) -> dict[str, Given]:
        """Admit a pod, or start its containers again; return what each container is given, by its name.

        Raises: Refused with the kubelet's reason; the pod is then gone.
        """
        answer = self._process.ask("allocate", pod=pod.as_json())
        self._pods[pod.uid] = pod
        return {name: Given.from_json(given) for name, given in answer.items()}

    def container(self, uid: str, name: str = "main") -> Given:
        """Start a container of an active pod again, as after a crash.

        Raises: Refused.
        """
        return Given.from_json(self._process.ask("container", uid=uid, container=name))

    def free(self, uid: str) -> None:
        """End a pod."""
        self._process.ask("free", uid=uid)
        del self._pods[uid]

    def pod_resources(self, uid: str) -> dict[str, dict[str, list[str]]]:
        """Ask the pod-resources service: container, resource, ids."""
        pod = self._pods[uid].as_json()
        answer: dict[str, dict[str, list[str]]] = self._process.ask(
            "pod-resources", name=pod["name"], namespace=pod["namespace"]
        )
        return answer


def monotonic_ns() -> int:
    """Return the clock that `start` and `wait` answer with."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
