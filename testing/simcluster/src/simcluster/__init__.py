# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""A kubelet for fast tests, and the plugin's command as a child process. Nothing that ships depends on it."""
