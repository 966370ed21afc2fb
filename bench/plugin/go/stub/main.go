// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Command stub is a peer that every machine can build: the kubelet's own device
// plugin stub, which lists the VFIO devices of the node once, when it starts.
// It stands for what a Go plugin costs that is written with what Kubernetes
// provides and does no more than the protocol asks.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	plugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

const class = "/sys/class/vfio-dev"

func attribute(entry, name string) string {
	data, err := os.ReadFile(filepath.Join(class, entry, "device", name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

// resourceOf says which resource a function belongs to: 3D controllers, displays and other bridges of one vendor.
func resourceOf(vendor, class string) string {
	switch {
	case vendor != "0x10de":
		return ""
	case strings.HasPrefix(class, "0x0302"), strings.HasPrefix(class, "0x0300"):
		return "stub.example.com/gpu"
	case strings.HasPrefix(class, "0x0680"):
		return "stub.example.com/nvswitch"
	}
	return ""
}

func devices() (map[string][]*api.Device, error) {
	entries, err := os.ReadDir(class)
	if err != nil {
		return nil, err
	}
	found := map[string][]*api.Device{}
	for _, entry := range entries {
		resource := resourceOf(attribute(entry.Name(), "vendor"), attribute(entry.Name(), "class"))
		if resource == "" {
			continue
		}
		address, err := filepath.EvalSymlinks(filepath.Join(class, entry.Name(), "device"))
		if err != nil {
			return nil, err
		}
		device := &api.Device{ID: filepath.Base(address), Health: api.Healthy}
		if node, err := strconv.ParseInt(attribute(entry.Name(), "numa_node"), 10, 64); err == nil && node >= 0 {
			device.Topology = &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: node}}}
		}
		found[resource] = append(found[resource], device)
	}
	return found, nil
}

func allocator(resource string) func(*api.AllocateRequest, map[string]*api.Device) (*api.AllocateResponse, error) {
	return func(request *api.AllocateRequest, known map[string]*api.Device) (*api.AllocateResponse, error) {
		answer := &api.AllocateResponse{}
		for _, container := range request.ContainerRequests {
			given := &api.ContainerAllocateResponse{}
			for _, id := range container.DevicesIds {
				if known[id] == nil {
					return nil, fmt.Errorf("no device %s", id)
				}
				given.CdiDevices = append(given.CdiDevices, &api.CDIDevice{Name: resource + "=" + id})
			}
			answer.ContainerResponses = append(answer.ContainerResponses, given)
		}
		return answer, nil
	}
}

func main() {
	ctx := context.Background()
	logger := klog.FromContext(ctx)
	found, err := devices()
	if err != nil {
		logger.Error(err, "No devices")
		os.Exit(1)
	}
	failed := make(chan error)
	for resource, list := range found {
		name := strings.ReplaceAll(resource, "/", "-") + ".sock"
		stub := plugin.NewDevicePluginStub(logger, list, filepath.Join(api.DevicePluginPath, name), resource, false, false)
		stub.SetAllocFunc(allocator(resource))
		go func() {
			if err := stub.Start(ctx); err != nil {
				failed <- err
				return
			}
			if err := stub.Register(ctx, api.KubeletSocket, resource, api.DevicePluginPath); err != nil {
				failed <- err
				return
			}
			stub.Watch(ctx, api.KubeletSocket, resource, api.DevicePluginPath)
		}()
	}
	logger.Error(<-failed, "Ended")
	os.Exit(1)
}
