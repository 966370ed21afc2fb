// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Shared by the programs beside it; their go.mod files decide the versions.
module kata-devices/conformance/kubelet/devicenode

go 1.24.0

require k8s.io/kubernetes v1.34.4
