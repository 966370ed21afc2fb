# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""What one resource offers now: its list, the CDI file that goes with it, and what a request for ids is answered.

The file is made true before the list that names its ids, and before a grant. A device whose name is not on disk, since
the file can't be written, is listed Unhealthy: nothing is offered that could not be started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

from kata_device_plugin.cdi import Entry, SpecFile
from kata_device_plugin.errors import NotAllocatable, SpecUnwritable
from kata_device_plugin.ledger import Listed
from kata_device_plugin.preference import preferred
from kata_device_plugin.resources import Resource


class Offer:
    """One resource's devices, in address order, and the callbacks of those who want to know when they change."""

    def __init__(self, resource: Resource, spec: SpecFile, confirm: Callable[[Listed], str | None]) -> None:
        """Start with nothing on offer.

        `confirm` looks at one healthy device anew and returns why it can't be handed out, or None.
        """
        self.resource = resource
        self.spec = spec
        self._confirm = confirm
        self._wanted: tuple[Listed, ...] = ()
        self._listed: tuple[Listed, ...] = ()
        self._by_id: dict[str, Listed] = {}
        self._watchers: set[Callable[[], None]] = set()
        self.failure: SpecUnwritable | None = None

    @property
    def listed(self) -> tuple[Listed, ...]:
        """The devices as the kubelet is to see them."""
        return self._listed

    def subscribe(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call `watcher` after every change of the list; return what ends that."""
        self._watchers.add(watcher)
        return lambda: self._watchers.discard(watcher)

    def replace(self, listed: Sequence[Listed]) -> bool:
        """Offer these devices: the CDI file first, then the list. Say whether the file changed.

        A file that can't be written is kept in `failure` and tried again by `refresh` and `grant`.
        """
        self._wanted = tuple(listed)
        entries = [Entry(device.address.text, device.node) for device in listed if device.healthy]
        return self._publish(lambda: self.spec.replace(entries))

    def refresh(self) -> bool:
        """Put the CDI file right if it is not. Say whether it changed. One `stat` when nothing happened."""
        return self._publish(self.spec.restore)

    def grant(self, device_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the CDI names of these ids, in their order, once the file on disk holds them.

        The list the kubelet asks from may be older than the hardware, so each device is looked at anew. No books are
        kept on what was granted: those are the kubelet's.

        Raises: NotAllocatable, SpecUnwritable.
        """
        for device_id in device_ids:
            listed = self._by_id.get(device_id)
            if listed is None:
                raise self._refusal(device_id, "no such device is listed")
            reason = listed.reason or "unhealthy"
            if listed.healthy:
                reason = self._confirm(listed) or ""
            if reason:
                raise self._refusal(device_id, reason)
        self.refresh()
        if self.failure is not None and not all(self._by_id[device_id].healthy for device_id in device_ids):
            raise self.failure
        return tuple(self.resource.qualified(device_id) for device_id in device_ids)

    def prefer(self, available: Sequence[str], must_include: Sequence[str], size: int) -> tuple[str, ...]:
        """Choose among ids; see `preference.preferred`."""
        places = {
            device_id: self._by_id[device_id].place
            for device_id in {*available, *must_include}
            if device_id in self._by_id
        }
        return preferred(available, must_include, size, places)

    def _refusal(self, device_id: str, reason: str) -> NotAllocatable:
        present = [device.address.text for device in self._listed if device.healthy]
        return NotAllocatable(self.resource.name, device_id, reason, present)

    def _publish(self, write: Callable[[], bool]) -> bool:
        changed = False
        try:
            changed = write()
            self.failure = None
        except SpecUnwritable as failure:
            self.failure = failure
        listed = self._wanted if self.failure is None else tuple(map(self._as_on_disk, self._wanted))
        if listed != self._listed:
            self._listed = listed
            self._by_id = {device.address.text: device for device in listed}
            for watcher in tuple(self._watchers):
                watcher()
        return changed

    def _as_on_disk(self, device: Listed) -> Listed:
        """Take a device off the healthy ones unless the file that could not be replaced already says the right thing."""
        if not device.healthy or Entry(device.address.text, device.node) in self.spec.on_disk:
            return device
        reason = f"not in {os.path.basename(self.spec.path)}, which cannot be written"
        return replace(device, healthy=False, reason=reason)
