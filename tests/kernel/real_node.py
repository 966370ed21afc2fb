# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A node with a real kernel, inside a guest: its devices, a kubelet, the plugin, and who watches them.

Everything is asked and done through the guest's agent; times are the guest's CLOCK_MONOTONIC.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from conformance.json_lines import JsonLines, Refused
from conformance.real_kubelet import Kubelet
from conformance.reference_cdi import CdiLibrary
from tests.kernel.waiting import DEADLINE_S, until

from vmlab.build import STOCK_MODULES
from vmlab.guest import Guest, Program

GPU: Final = "nvidia.com/gpu"
SWITCH: Final = "nvidia.com/nvswitch"
IDS: Final = "10de:2330,10de:22a3"
PLUGIN_DIR: Final = "/var/lib/kubelet/device-plugins"
CDI_DIR: Final = "/var/run/cdi"
_PCI: Final = "/sys/bus/pci"
_PLUGIN: Final = ("/usr/bin/python3", "-m", "kata_device_plugin")
_ENVIRONMENT: Final = {"PYTHONPATH": "/payload/site"}

# The last first; what is not loaded is no error.
_MODULES: Final = ("vfio_pci", "vfio_pci_core", "mdev", "vfio_iommu_type1", "vfio", "iommufd")

# A container of a DaemonSet, as far as it matters here: root without capabilities, nothing writable but the two
# directories that it writes to, /sys read only, and in /dev nothing but /dev/vfio.
_CONTAINER: Final = f"""
set -e
mkdir -p /dev/vfio {PLUGIN_DIR} {CDI_DIR} /run/container
mount --bind /dev/vfio /run/container
mount -t tmpfs -o size=1m tmpfs /dev
mknod -m 666 /dev/null c 1 3
mkdir /dev/vfio
mount --move /run/container /dev/vfio
mount --bind {PLUGIN_DIR} {PLUGIN_DIR}
mount --bind {CDI_DIR} {CDI_DIR}
for place in / /run /sys /dev/vfio; do mount -o remount,bind,ro "$place"; done
exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --no-new-privs -- "$@"
"""

# klog's header: severity, month and day, time with microseconds. Source: k8s.io/klog/v2 internal/buffer/buffer.go
_PUSHED: Final = re.compile(
    r'^I(\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{6}) .*"State pushed for device plugin" resource="([^"]+)"', re.MULTILINE
)


class GuestLines(JsonLines):
    """A program in the guest that is asked with JSON objects, like one on this machine."""

    def __init__(self, guest: Guest, argv: list[str], *, name: str) -> None:
        self.name = name
        self._program = guest.spawn(name, argv)

    @property
    def pid(self) -> int:
        """Its process id in the guest."""
        return self._program.pid

    def errors(self) -> str:
        """Return what it wrote to standard error."""
        return self._program.errors()

    def ask(self, op: str, *, within_s: float = DEADLINE_S, **parameters: Any) -> Any:
        """Send one request and return its result.

        Raises: Refused, AgentRefused when it ended or says nothing.
        """
        self._program.tell(json.dumps({"op": op, **parameters}))
        answer = json.loads(self._program.hear(within_s=within_s))
        if not answer["ok"]:
            raise Refused(self.name, op, answer.get("reason", ""), answer.get("error", ""))
        return answer.get("result")

    def kill(self) -> None:
        """End it with SIGKILL."""
        self._program.end("SIGKILL")


class GuestKubelet(Kubelet):
    """The kubelet's device manager in the guest, in its own /var/lib/kubelet."""

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        super().__init__(Path("/payload/kubelet"), Path("/run/kubelet"), release="1.37")

    def log_text(self) -> str:
        """Return the kubelet's log."""
        return self._guest.get("/run/kubelet.log").decode(errors="replace")

    def _spawn(self) -> JsonLines:
        return GuestLines(self._guest, ["/payload/kubelet", "-v=2"], name="kubelet")


class GuestCdiLibrary(CdiLibrary):
    """The reference CDI library in the guest."""

    def __init__(self, guest: Guest) -> None:
        self.release = "1.1"
        self._process = GuestLines(guest, ["/payload/cdi"], name="cdi")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of the kernel in /dev/vfio; `what` is create, delete, delete-self or present."""

    what: str
    path: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Push:
    """A list that reached the kubelet's device manager."""

    resource: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Latency:
    """From the kernel's event to the kubelet's stream."""

    action: str
    milliseconds: float


class RealNode:
    """The guest's node between two tests: `reset` brings it back to functions on the bus, no VFIO, no programs."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self.latencies: list[Latency] = []
        self._programs: dict[str, Program] = {}
        self._kubelet: GuestKubelet | None = None
        self._cdi: GuestCdiLibrary | None = None
        self._events: list[Event] = []
        self._clock_ns = 0

    # Functions.

    def address(self, name: str) -> str:
        """Return the address of a function of the machine."""
        return self.guest.machine.address(name)

    @property
    def gpus(self) -> tuple[str, ...]:
        """Addresses of the GPUs."""
        return tuple(self.address(name) for name in self.guest.functions if name.startswith("gpu"))

    @property
    def switches(self) -> tuple[str, ...]:
        """Addresses of the NVSwitches."""
        return tuple(self.address(name) for name in self.guest.functions if name.startswith("switch"))

    def load_vfio(self, *, stock: bool = False) -> None:
        """Load vfio-pci with the ids of the board; `stock` loads what the distribution ships, without device nodes."""
        place = f"-d {STOCK_MODULES} " if stock else ""
        self.guest.run(f"modprobe {place}vfio-pci ids={IDS}")

    def unbind(self, address: str) -> None:
        """Detach a function from vfio-pci."""
        self.guest.run(f"echo {address} > {_PCI}/drivers/vfio-pci/unbind")

    def bind(self, address: str) -> None:
        """Attach a function to vfio-pci."""
        self.guest.run(f"echo {address} > {_PCI}/drivers/vfio-pci/bind")

    def remove(self, address: str) -> None:
        """Take a function off the bus."""
        self.guest.run(f"echo 1 > {_PCI}/devices/{address}/remove")

    def rescan(self) -> None:
        """Have the kernel look for functions that are not known."""
        self.guest.run(f"echo 1 > {_PCI}/rescan")

    def cdevs(self) -> dict[str, str]:
        """Return which node each function has, as the kernel says it: address to path."""
        out = self.guest.run("cd /sys/class/vfio-dev && for n in *; do echo $n $(readlink -f $n/device); done").out
        pairs = (line.split() for line in out.splitlines())
        return {path.rsplit("/", 1)[1]: f"/dev/vfio/devices/{name}" for name, path in pairs}

    # Programs.

    def start_observer(self) -> None:
        """Start to watch /dev/vfio, ahead of everything else when there is something to do."""
        self._spawn("observer", ["chrt", "--fifo", "50", "/usr/bin/python3", "/payload/observer.py"])
        self.events()

    def events(self) -> tuple[Event, ...]:
        """Return what the kernel has told of /dev/vfio so far."""
        observer = self._programs["observer"]
        observer.tell("")
        answer = json.loads(observer.hear())
        self._clock_ns = answer["realtime_minus_monotonic_ns"]
        self._events += [Event(**event) for event in answer["events"]]
        return tuple(self._events)

    def start_kubelet(self) -> GuestKubelet:
        """Start the kubelet's device manager."""
        self._kubelet = GuestKubelet(self.guest)
        self._kubelet.start(numa_nodes=1)
        return self._kubelet

    def cdi(self) -> GuestCdiLibrary:
        """Start the reference CDI library, reading the directories that Kata reads."""
        if self._cdi is None:
            self._cdi = GuestCdiLibrary(self.guest)
            self._cdi.open([Path("/etc/cdi"), Path(CDI_DIR)])
        return self._cdi

    def start_plugin(self, *, contained: bool = False) -> PluginInGuest:
        """Start the plugin with the paths that it has by itself; `contained` in a container's shape."""
        before = ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _CONTAINER, "sh"]
        return PluginInGuest(self, self._spawn("plugin", [*(before if contained else ()), *_PLUGIN], env=_ENVIRONMENT))

    def _spawn(self, name: str, argv: list[str], *, env: dict[str, str] | None = None) -> Program:
        self._programs[name] = self.guest.spawn(name, argv, env=env)
        return self._programs[name]

    def end_program(self, name: str, signal: str) -> int:
        """Send a program a signal, wait for its end and return its exit status."""
        return self._programs.pop(name).end(signal)

    # Time.

    def pushes(self) -> tuple[Push, ...]:
        """Return when which list reached the kubelet, from the kubelet's own log."""
        assert self._kubelet is not None
        lines = self._kubelet.log_text()
        year = int(self.guest.run("date -u +%Y").out)
        found = []
        for month, day, hour, minute, second, micro, resource in _PUSHED.findall(lines):
            at = datetime(year, int(month), int(day), int(hour), int(minute), int(second), tzinfo=UTC)
            at_ns = int(at.timestamp()) * 1_000_000_000 + int(micro) * 1000 - self._clock_ns
            found.append(Push(resource, at_ns))
        return tuple(found)

    def timed(self, action: str, do: Callable[[], None], *, resource: str, what: str, path: str) -> Latency:
        """Do something, and measure from the kernel's event at `path` to the next list of `resource` at the kubelet."""
        known = len(self.events())
        do()

        def event() -> Event | None:
            fresh = self.events()[known:]
            return next((seen for seen in fresh if seen.what in what.split("|") and seen.path == path), None)

        happened = until(event, f"{what} of {path}", lambda: str(self._events[known:]))

        def push() -> Push | None:
            return next((p for p in self.pushes() if p.resource == resource and p.at_ns >= happened.at_ns), None)

        arrived = until(push, f"a list of {resource} at the kubelet", lambda: str(self.pushes()))
        latency = Latency(action, (arrived.at_ns - happened.at_ns) / 1e6)
        self.latencies.append(latency)
        return latency

    # Between two tests.

    def reset(self) -> None:
        """Stop what runs and bring the node back to how it is after boot, without VFIO."""
        for program in self._programs.values():
            program.end("SIGKILL")
        for driven in (self._kubelet, self._cdi):
            if driven is not None:
                driven.__exit__()
        self._programs, self._kubelet, self._cdi, self._events = {}, None, None, []
        self.guest.run(f"echo 1 > {_PCI}/rescan")
        self.unload_vfio()
        self.guest.run(f"rm -rf /dev/vfio /var/lib/kubelet {CDI_DIR} /etc/cdi; mkdir -p {PLUGIN_DIR}")

    def unload_vfio(self) -> None:
        """Detach every function of the board and unload every module of VFIO."""
        for address in (*self.gpus, *self.switches):
            driver = f"{_PCI}/devices/{address}/driver"
            self.guest.run(f"test ! -e {driver} || echo {address} > {driver}/unbind")
        for module in _MODULES:
            self.guest.run(f"! grep -q '^{module} ' /proc/modules || rmmod {module}")


class PluginInGuest:
    """The plugin as a process in the guest."""

    def __init__(self, node: RealNode, program: Program) -> None:
        self._node = node
        self._program = program

    @property
    def pid(self) -> int:
        """Its process id in the guest."""
        return self._program.pid

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Return its event lines so far, or those of some names."""
        text = self._program.errors()
        lines = text[: text.rfind("\n") + 1].splitlines()
        parsed = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in parsed if not names or line["event"] in names]

    def wait_for(self, name: str, *, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait until an event line with these fields has come so often; return the last of them."""

        def found() -> dict[str, Any] | None:
            matching = [e for e in self.events(name) if all(e.get(key) == value for key, value in fields.items())]
            return matching[count - 1] if len(matching) >= count else None

        return until(found, f"{name} {fields} {count} times", self._program.errors)

    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._program.is_running()

    def terminate(self) -> int:
        """Send SIGTERM and return the exit status."""
        return self._node.end_program("plugin", "SIGTERM")


def cdi_nodes(guest: Guest, kind: str) -> dict[str, str]:
    """Return which node the CDI file of a kind names for each device."""
    spec = json.loads(guest.get(f"{CDI_DIR}/kata.{kind.replace('/', '-')}.json"))
    return {device["name"]: device["containerEdits"]["deviceNodes"][0]["path"] for device in spec["devices"]}


def names(addresses: Iterable[str], kind: str) -> tuple[str, ...]:
    """Return the CDI names of devices."""
    return tuple(f"{kind}={address}" for address in addresses)
