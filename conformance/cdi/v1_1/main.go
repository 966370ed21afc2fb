// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Command v1_1 asks release 1.1 of the reference CDI library; see package resolver.
package main

import (
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"kata-devices/conformance/cdi/resolver"
)

func main() {
	resolver.Main(resolver.Library{
		Module: "tags.cncf.io/container-device-interface",
		Open: func(dirs []string, watch bool) (resolver.Cache, error) {
			return cdi.NewCache(cdi.WithSpecDirs(dirs...), cdi.WithAutoRefresh(watch))
		},
	})
}
