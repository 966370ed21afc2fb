# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""Guests with a real kernel, a real vfio-pci, and emulated NVIDIA functions on their PCI bus."""
