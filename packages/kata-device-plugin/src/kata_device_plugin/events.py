# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Every event line that the plugin can write, by name; docs/events.md says what each one means."""

from __future__ import annotations

from enum import StrEnum


class Event(StrEnum):
    """Names of event lines: what it is about, then what happened to it."""

    RUN_STARTED = "run.started"

    NODE_WITHOUT_DEVICES = "node.without-devices"
    NODE_WITHOUT_DEVICE_NODES = "node.without-device-nodes"
    SCAN_FAILED = "scan.failed"
    SCAN_RECOVERED = "scan.recovered"
    ENTRY_SKIPPED = "entry.skipped"

    DEVICE_LISTED = "device.listed"
    DEVICE_HEALTHY = "device.healthy"
    DEVICE_UNHEALTHY = "device.unhealthy"
    DEVICE_LEFT = "device.left"

    CDI_WRITTEN = "cdi.written"
    CDI_REMOVED = "cdi.removed"
    CDI_FAILED = "cdi.failed"
    CDI_RECOVERED = "cdi.recovered"
    CDI_FOREIGN_PROBLEM = "cdi.foreign-problem"
    CDI_FOREIGN_SOLVED = "cdi.foreign-solved"

    KUBELET_ABSENT = "kubelet.absent"
    KUBELET_REGISTERED = "kubelet.registered"
    KUBELET_REFUSED = "kubelet.refused"
    KUBELET_LISTENING = "kubelet.listening"
    KUBELET_GONE = "kubelet.gone"
    SOCKET_FAILED = "socket.failed"
    SIBLING_GONE = "sibling.gone"

    DEVICE_ALLOCATED = "device.allocated"
    ALLOCATION_REFUSED = "allocation.refused"

    WATCH_UNAVAILABLE = "watch.unavailable"
    WATCH_RESTORED = "watch.restored"

    UNEXPECTED = "run.unexpected"
