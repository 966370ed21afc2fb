# SPDX-FileCopyrightText: The kata-devices Authors
# SPDX-License-Identifier: Apache-2.0
"""The kubelet's device plugin protocol, version v1beta1.

`deviceplugin.proto` is written by hand; `deviceplugin_pb2.py` and its stub are generated from it by `make proto`.
"""
