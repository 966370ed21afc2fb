// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Shared by the programs beside it; their go.mod files decide the versions.
module kata-devices/conformance/cdi/resolver

go 1.23

require github.com/opencontainers/runtime-spec v1.1.0-rc.1
