# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""A simulated node: named boards as directory trees that change the way a kernel changes them.

`boards` names nodes, `node` says what a node is, `tree` writes one below a directory and changes it. Nothing here
shares code with what it tests: addresses are plain strings and numbers are written as sysfs writes them.
"""
