# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Which resource name a kind of device has, and the file and socket names that follow from it.

A new kind is one row here and one row in `pcifacts.ids`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pcifacts.ids import DeviceKind

# A name part of 1 to 63 characters below a DNS subdomain. "requests." is put in front of it when the kubelet and the
# scheduler keep quota, and the two together may hold 253 characters.
# Source: k8s.io/kubernetes pkg/apis/core/v1/helper IsExtendedResourceName
_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_DOMAIN_LIMIT: Final = 253 - len("requests.")

# A CDI class must not hold a dot: that needs spec version 0.6.0.
# Source: github.com/container-orchestrated-devices/container-device-interface v0.6.0, pkg/cdi/version.go
_CDI_CLASS = re.compile(r"[A-Za-z]([-A-Za-z0-9_]*[A-Za-z0-9])?")


class ResourceNameInvalid(ValueError):
    """A resource name that a kubelet would refuse, or that can't be a CDI kind of version 0.5.0 as well."""

    def __init__(self, name: str, rule: str) -> None:
        """Keep the name and the rule that it breaks."""
        super().__init__(f"resource name {name!r}: {rule}")
        self.name = name
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Resource:
    """An extended resource: its name is the CDI kind as well, since Kata looks devices up by `<resource>=<id>`.

    Source: kata-containers src/runtime/pkg/containerd-shim-v2/device_cold_plug.go
    """

    name: str

    def __post_init__(self) -> None:
        """Refuse a name that the kubelet or a CDI reader would refuse.

        Raises: ResourceNameInvalid.
        """
        domain, slash, name = self.name.partition("/")
        if not slash or "/" in name:
            raise ResourceNameInvalid(self.name, "expected domain/name with exactly one slash")
        if not _NAME.fullmatch(name):
            raise ResourceNameInvalid(self.name, "expected 1 to 63 letters, digits, '-', '_', '.' after the slash")
        if not _DOMAIN.fullmatch(domain) or len(domain) + 1 + len(name) > _DOMAIN_LIMIT:
            raise ResourceNameInvalid(self.name, "expected a DNS subdomain before the slash")
        if "kubernetes.io/" in self.name or domain.startswith("requests."):
            raise ResourceNameInvalid(self.name, "expected a domain that Kubernetes does not keep for itself")
        if not _CDI_CLASS.fullmatch(name):
            raise ResourceNameInvalid(self.name, "expected a CDI class after the slash: a letter first, no dots")

    @property
    def slug(self) -> str:
        """The name with a dash for the slash, as it stands in file names: `nvidia.com-gpu`."""
        return self.name.replace("/", "-")

    @property
    def spec_file(self) -> str:
        """Base name of the CDI file; JSON, which every CDI reader takes."""
        return f"kata.{self.slug}.json"

    @property
    def socket_prefix(self) -> str:
        """What the base name of every instance's socket begins with."""
        return f"kata-{self.slug}-"

    def qualified(self, device_id: str) -> str:
        """Return the fully qualified CDI name of a device: `nvidia.com/gpu=0000:65:00.0`."""
        return f"{self.name}={device_id}"


RESOURCES: Final[Mapping[DeviceKind, Resource]] = {
    DeviceKind.GPU: Resource("nvidia.com/gpu"),
    DeviceKind.NVSWITCH: Resource("nvidia.com/nvswitch"),
}
