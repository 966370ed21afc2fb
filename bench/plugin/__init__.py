# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0

"""Measures device plugins beside one another on the same simulated node; see bench/README.md for the method."""
