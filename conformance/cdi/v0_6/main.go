// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Command v0_6 asks release 0.6 of the reference CDI library; see package resolver.
package main

import (
	"github.com/container-orchestrated-devices/container-device-interface/pkg/cdi"

	"kata-devices/conformance/cdi/resolver"
)

func main() {
	resolver.Main(resolver.Library{
		Module: "github.com/container-orchestrated-devices/container-device-interface",
		Open: func(dirs []string, watch bool) (resolver.Cache, error) {
			return cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(watch))
		},
	})
}
