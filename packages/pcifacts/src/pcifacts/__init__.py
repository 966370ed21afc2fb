# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Facts about PCI functions, IOMMU groups and VFIO devices, read from sysfs.

Nothing here writes, runs a process or keeps state between calls: every function takes the directories to read
and says what is there now. Import the module that holds the question: `from pcifacts import vfio`.
"""
