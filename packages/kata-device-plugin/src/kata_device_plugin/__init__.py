# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Advertises VFIO-bound NVIDIA devices to the kubelet, for Kata VMs.

The package reads sysfs and /dev/vfio, writes its own CDI files, and talks to the kubelet over unix sockets. It never
changes a device; what does is another program.
"""

from typing import Final

VERSION: Final = "0.1.0"
