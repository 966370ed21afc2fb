# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The plugin's one loop: notices, looks, decides, publishes.

One thread, no timer that runs for nothing: between two rescans the process sleeps until a directory changes, a kubelet
calls, or a device that lost its node has to be looked at again.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from eventline import EventLog
from kata_device_plugin import cdi, cdi_audit, server
from kata_device_plugin.errors import PluginError
from kata_device_plugin.events import Event
from kata_device_plugin.ledger import Change, Ledger, Listed, Verdict
from kata_device_plugin.offer import Offer
from kata_device_plugin.registration import Registration
from kata_device_plugin.resources import RESOURCES, Resource
from kata_device_plugin.scanner import Observation, Scanner, Sighting, Standing
from kata_device_plugin.server import ResourceServer
from kata_device_plugin.watch import DirectoryWatch, Names, Unavailable
from pcifacts.address import PciAddress
from pcifacts.errors import PathUnreadable
from pcifacts.ids import DeviceKind
from pcifacts.sysfs import Roots, SkipKind, Skipped

# The safety net under the directory events: a driver that changes without its node changing, an event that was lost.
RESCAN_S: Final = 10.0
# How often to look where the kernel gives no inotify at all.
BLIND_RESCAN_S: Final = 1.0
# Devices that arrive in a burst are listed together: the kubelet rewrites its checkpoint for every list that it gets.
# The first of a burst and every loss are listed at once.
GATHER_S: Final = 0.05
# To parse somebody's YAML can take a second: not before our own lists are out, and not for every step of a rewrite.
AUDIT_DELAY_S: Final = 0.5

_VERDICTS: Final[Mapping[Verdict, Event]] = {
    Verdict.LISTED: Event.DEVICE_LISTED,
    Verdict.HEALTHY: Event.DEVICE_HEALTHY,
    Verdict.MOVED: Event.DEVICE_HEALTHY,
    Verdict.UNHEALTHY: Event.DEVICE_UNHEALTHY,
    Verdict.LEFT: Event.DEVICE_LEFT,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Every path that the plugin uses, as on the command line."""

    sysfs: str = "/sys"
    dev_vfio: str = "/dev/vfio"
    device_plugin_dir: str = "/var/lib/kubelet/device-plugins"
    cdi_dir: str = "/var/run/cdi"
    cdi_static_dir: str = "/etc/cdi"

    @property
    def roots(self) -> Roots:
        """Where facts are read."""
        return Roots(self.sysfs, self.dev_vfio)


Watcher = Callable[[Iterable[str]], DirectoryWatch]


class Daemon:
    """The plugin on one node. `run` returns when the process is told to stop."""

    def __init__(self, settings: Settings, log: EventLog, *, watcher: Watcher = DirectoryWatch) -> None:
        """Prepare; nothing is read or written yet.

        `watcher` makes the directory watch; a test hands in one that the kernel refuses.

        Raises: PathTooLong when no socket can be bound below the device plugin directory.
        """
        self._settings = settings
        self._log = log
        self._make_watch = watcher
        self._scanner = Scanner(settings.roots)
        self._ledger = Ledger()
        self._offers = {
            kind: Offer(resource, cdi.SpecFile(settings.cdi_dir, resource), self._confirm)
            for kind, resource in RESOURCES.items()
        }
        for resource in RESOURCES.values():
            server.socket_path(settings.device_plugin_dir, resource.socket_prefix)
        self._registrations: dict[DeviceKind, Registration] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._stopping = False
        self._watch: DirectoryWatch | None = None
        self._watch_problem = ""
        self._devices_dir = os.path.normpath(settings.roots.device_nodes)
        self._plugin_dir = os.path.normpath(settings.device_plugin_dir)
        self._cdi_dirs = tuple(map(os.path.normpath, (settings.cdi_static_dir, settings.cdi_dir)))
        self._audit_of_others = cdi_audit.Audit()
        self._changed_cdevs: set[str] = set()
        self._must_rescan = True
        self._must_restore = False
        self._audit_at_s: float | None = None
        self._published_s = float("-inf")
        self._unpublished: set[DeviceKind] = set()
        self._said_skipped: frozenset[Skipped] = frozenset()
        self._said_problems: frozenset[cdi_audit.Problem] = frozenset()
        self._said_without_nodes: tuple[PciAddress, ...] = ()
        self._said_empty = False
        self._scan_problem = ""
        self._cdi_failed: dict[DeviceKind, str] = {}

    def stop(self) -> None:
        """End `run` as soon as the loop turns; safe to call more than once."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Advertise until told to stop, by `stop`, SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._say_unexpected)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            # The watch stands before the first look, so that nothing falls in between.
            self._open_watch()
            cdi.sweep(self._settings.cdi_dir, RESOURCES.values())
            rescan_at = loop.time()
            while not self._stopping:
                self._wake.clear()
                now = loop.time()
                if self._must_rescan or now >= rescan_at:
                    self._rescan(now)
                    rescan_at = loop.time() + (RESCAN_S if self._watch else BLIND_RESCAN_S)
                else:
                    self._look(now)
                    if self._audit_at_s is not None and now >= self._audit_at_s:
                        self._audit()
                self._publish(loop.time())
                await self._sleep(rescan_at, loop)
        finally:
            await self._close()

    async def _sleep(self, rescan_at: float, loop: asyncio.AbstractEventLoop) -> None:
        due = [rescan_at]
        recheck = self._ledger.due_at_s()
        if recheck is not None:
            due.append(recheck)
        if self._unpublished:
            due.append(self._published_s + GATHER_S)
        if self._audit_at_s is not None:
            due.append(self._audit_at_s)
        try:
            async with asyncio.timeout_at(max(min(due), loop.time())):
                await self._wake.wait()
        except TimeoutError:
            return

    # --- noticing ---

    def _open_watch(self) -> None:
        directories = (self._devices_dir, self._plugin_dir, *self._cdi_dirs)
        try:
            self._watch = self._make_watch(directories)
        except Unavailable as error:
            self._lose_watch(error)
            return
        asyncio.get_running_loop().add_reader(self._watch.fileno(), self._read_watch)
        if self._watch_problem:
            self._watch_problem = ""
            self._log.info(Event.WATCH_RESTORED, rescan_s=RESCAN_S)
        self._set_blind(blind=False)

    def _lose_watch(self, error: Unavailable) -> None:
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        if not self._watch_problem:
            self._log.warning(Event.WATCH_UNAVAILABLE, reason=str(error), rescan_s=BLIND_RESCAN_S)
        self._watch_problem = str(error)
        self._set_blind(blind=True)

    def _set_blind(self, *, blind: bool) -> None:
        for registration in self._registrations.values():
            registration.blind = blind
            registration.wake()

    def _read_watch(self) -> None:
        assert self._watch is not None
        try:
            changes = self._watch.read()
        except Unavailable as error:
            self._lose_watch(error)
            self._must_rescan = True
            self._wake.set()
            return
        for directory, names in changes.items():
            self._notice(directory, names)

    def _notice(self, directory: str, names: Names) -> None:
        if directory == self._devices_dir:
            if names is None:
                self._must_rescan = True
            else:
                self._changed_cdevs |= names
            self._wake.set()
        elif directory == self._plugin_dir:
            if names is None or any(name.endswith(".sock") for name in names):
                for registration in self._registrations.values():
                    registration.look_for_siblings()
                    registration.wake()
        elif names is None or any(not name.startswith(".") for name in names):
            self._plan_audit()
            self._wake.set()

    # --- looking ---

    def _rescan(self, now_s: float) -> None:
        """Look at everything: at start, when a directory was replaced, and as the safety net."""
        self._must_rescan = False
        self._changed_cdevs.clear()
        if self._watch is None:
            self._open_watch()
        try:
            observation = self._scanner.everything(self._ledger.addresses())
        except PathUnreadable as error:
            # Nothing was seen, so nothing may be concluded: the list stays as it is.
            if self._scan_problem != str(error):
                self._scan_problem = str(error)
                self._log.warning(Event.SCAN_FAILED, error=str(error), hint=error.hint)
            return
        if self._scan_problem:
            self._scan_problem = ""
            self._log.info(Event.SCAN_RECOVERED)
        self._take_in(observation, now_s)
        self._say_what_cannot_be_listed(observation.sightings)
        self._say_skipped(observation.skipped)
        for registration in self._registrations.values():
            registration.look_for_siblings()
            registration.wake()
        self._plan_audit()
        if self._registrations:
            # Not for its own sake a second awakening: what did not change is not read again.
            self._audit()

    def _look(self, now_s: float) -> None:
        """Look at what changed, and at what has not settled."""
        if self._changed_cdevs:
            names, self._changed_cdevs = self._changed_cdevs, set()
            self._take_in(self._scanner.names(names), now_s)
        due = self._ledger.due(now_s)
        if due:
            self._take_in(Observation(tuple(map(self._scanner.device, due))), now_s)

    def _take_in(self, observation: Observation, now_s: float) -> None:
        for change in self._ledger.apply(observation.sightings, now_s):
            self._unpublished.add(change.listed.kind)
            if change.verdict in (Verdict.UNHEALTHY, Verdict.LEFT):
                self._published_s = float("-inf")
            self._say_change(change)

    def _confirm(self, listed: Listed) -> str | None:
        """Look at one device for a request that is being answered."""
        if self._scanner.is_still(listed.address, listed.node):
            return None
        sighting = self._scanner.device(listed.address)
        self._must_rescan = True
        self._wake.set()
        return sighting.reason or f"its node is {sighting.node} now, no longer {listed.node}"

    # --- publishing ---

    def _publish(self, now_s: float) -> None:
        """Bring the changed resources to disk and to the kubelet; start a resource with its first device."""
        if self._unpublished and now_s >= self._published_s + GATHER_S:
            kinds, self._unpublished = self._unpublished, set()
            self._published_s = now_s
            for kind in (kind for kind in RESOURCES if kind in kinds):
                self._report_file(kind, changed=self._offers[kind].replace(self._ledger.of_kind(kind)))
                if kind not in self._registrations and self._offers[kind].listed:
                    self._start(kind)
        if self._must_restore:
            self._must_restore = False
            for kind, offer in self._offers.items():
                self._report_file(kind, changed=offer.refresh())

    def _report_file(self, kind: DeviceKind, *, changed: bool) -> None:
        offer = self._offers[kind]
        if offer.failure is not None:
            if self._cdi_failed.get(kind) != str(offer.failure):
                self._cdi_failed[kind] = str(offer.failure)
                self._log.warning(
                    Event.CDI_FAILED, resource=offer.resource.name, error=str(offer.failure), hint=offer.failure.hint
                )
            return
        if self._cdi_failed.pop(kind, None):
            self._log.info(Event.CDI_RECOVERED, resource=offer.resource.name, path=offer.spec.path)
        if changed:
            healthy = sum(device.healthy for device in offer.listed)
            event = Event.CDI_WRITTEN if healthy else Event.CDI_REMOVED
            self._log.info(event, resource=offer.resource.name, path=offer.spec.path, devices=healthy)

    def _start(self, kind: DeviceKind) -> None:
        """Register a resource, from now on for as long as the plugin runs."""
        offer = self._offers[kind]
        resource = offer.resource

        def make_server(path: str, listeners_changed: Callable[[], None]) -> ResourceServer:
            return ResourceServer(
                offer,
                path,
                granted=lambda ids: self._log.info(Event.DEVICE_ALLOCATED, resource=resource.name, devices=list(ids)),
                refused=lambda error: self._say_refused(resource, error),
                listeners_changed=listeners_changed,
            )

        registration = Registration(
            resource.name,
            self._settings.device_plugin_dir,
            resource.socket_prefix,
            make_server,
            self._log,
            blind=self._watch is None,
        )
        registration.look_for_siblings()
        self._registrations[kind] = registration
        task = asyncio.get_running_loop().create_task(registration.run(), name=f"registration {resource.name}")
        task.add_done_callback(self._ended)
        self._tasks.add(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A registration never ends by itself; what it raised is a bug and ends the run."""
        if not task.cancelled():
            self.stop()

    def _plan_audit(self) -> None:
        """Put our CDI files right at once, and look at those of others when there is time."""
        self._must_restore = True
        if self._audit_at_s is None:
            self._audit_at_s = asyncio.get_running_loop().time() + AUDIT_DELAY_S

    def _audit(self) -> None:
        self._audit_at_s = None
        own = {
            offer.resource.name: frozenset(device.address.text for device in offer.listed)
            for offer in self._offers.values()
        }
        problems = frozenset(self._audit_of_others.problems(self._cdi_dirs, own))
        for problem in sorted(problems - self._said_problems, key=lambda problem: problem.path):
            self._log.warning(
                Event.CDI_FOREIGN_PROBLEM,
                path=problem.path,
                reason=problem.reason,
                hint="no Kata sandbox starts on this node until its owner mends or removes the file",
            )
        solved = {problem.path for problem in self._said_problems} - {problem.path for problem in problems}
        for path in sorted(solved):
            self._log.info(Event.CDI_FOREIGN_SOLVED, path=path)
        self._said_problems = problems

    # --- saying ---

    def _say_change(self, change: Change) -> None:
        listed = change.listed
        write = self._log.warning if change.verdict is Verdict.UNHEALTHY else self._log.info
        write(
            _VERDICTS[change.verdict],
            resource=RESOURCES[listed.kind].name,
            device=listed.address.text,
            node=listed.node or None,
            health=server.HEALTHY if listed.healthy else server.UNHEALTHY,
            numa_node=listed.place.numa_node,
            reason=change.reason or None,
        )

    def _say_what_cannot_be_listed(self, sightings: Iterable[Sighting]) -> None:
        without_nodes = [sighting for sighting in sightings if sighting.standing is Standing.WITHOUT_NODES]
        addresses = tuple(sighting.address for sighting in without_nodes)
        if addresses and addresses != self._said_without_nodes:
            self._log.warning(
                Event.NODE_WITHOUT_DEVICE_NODES,
                devices=[address.text for address in addresses],
                reason=without_nodes[0].reason,
                hint="Kata needs /dev/vfio/devices: boot a kernel with IOMMUFD and VFIO_DEVICE_CDEV",
            )
        self._said_without_nodes = addresses
        empty = not addresses and not self._ledger.addresses()
        if empty and not self._said_empty:
            self._log.info(
                Event.NODE_WITHOUT_DEVICES,
                reason=_why_empty(self._settings.roots),
                hint="nothing to do: devices are listed as soon as they are bound to a VFIO driver",
            )
        self._said_empty = empty

    def _say_skipped(self, skipped: Iterable[Skipped]) -> None:
        # A mediated device is no PCI function, and nothing that anybody has to mend.
        seen = frozenset(entry for entry in skipped if entry.kind is not SkipKind.NOT_PCI)
        for entry in sorted(seen - self._said_skipped, key=lambda entry: entry.path):
            self._log.warning(Event.ENTRY_SKIPPED, path=entry.path, reason=entry.reason)
        self._said_skipped = seen

    def _say_refused(self, resource: Resource, error: PluginError) -> None:
        self._log.warning(Event.ALLOCATION_REFUSED, resource=resource.name, error=str(error), hint=error.hint)

    def _say_unexpected(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Turn what the event loop would print as a traceback into one line; the run goes on.

        What a protocol raised over the bytes that it got is the doing of whoever sent them: that connection is closed
        already, and nothing is said, or anybody with access to the socket could fill the log.
        """
        if "protocol" in context:
            return
        error = context.get("exception")
        self._log.warning(
            Event.UNEXPECTED,
            error=f"{context.get('message', '')}: {type(error).__name__}: {error}" if error else context.get("message"),
            hint="a bug that did no harm here; please report this line",
        )

    async def _close(self) -> None:
        """Let go of everything but the CDI files: names stay resolvable while the next instance starts."""
        for task in self._tasks:
            task.cancel()
        results = await asyncio.gather(*self._tasks, return_exceptions=True)
        for registration in self._registrations.values():
            registration.close()
        if self._watch is not None:
            asyncio.get_running_loop().remove_reader(self._watch.fileno())
            self._watch.close()
            self._watch = None
        # Calls end, then the sockets go: another instance that sees them go finds the streams already ended.
        await asyncio.sleep(0)
        for registration in self._registrations.values():
            registration.unlink()
        for result in results:
            if isinstance(result, Exception):
                raise result


def _why_empty(roots: Roots) -> str:
    """Say what is missing for devices to appear, from the most basic on."""
    if not os.path.isdir(roots.iommu_groups) or not os.listdir(roots.iommu_groups):
        return f"{roots.iommu_groups} is empty: the IOMMU is off, in firmware or on the kernel command line"
    if not os.path.isdir(roots.dev_vfio):
        return f"{roots.dev_vfio} does not exist: no device is bound to a VFIO driver"
    return "no NVIDIA GPU or NVSwitch is bound to a VFIO driver"
