// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Command v1_34 is the device side of the kubelet of Kubernetes 1.34; see package devicenode.
package main

import (
	"context"

	cadvisor "github.com/google/cadvisor/info/v1"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"

	"kata-devices/conformance/kubelet/devicenode"
)

func machine(numaNodes int) []cadvisor.Node {
	nodes := make([]cadvisor.Node, numaNodes)
	for i := range nodes {
		nodes[i].Id = i
	}
	return nodes
}

func main() {
	devicenode.Main(devicenode.Release{
		NewTopologyManager: func(numaNodes int, policy, scope string) (topologymanager.Manager, error) {
			return topologymanager.NewManager(machine(numaNodes), policy, scope, nil)
		},
		NewDeviceManager: func(numaNodes int, t topologymanager.Manager) (*devicemanager.ManagerImpl, error) {
			return devicemanager.NewManagerImpl(machine(numaNodes), t)
		},
		AddHintProvider: func(t topologymanager.Manager, m *devicemanager.ManagerImpl) { t.AddHintProvider(m) },
		Start: func(
			m *devicemanager.ManagerImpl, pods devicemanager.ActivePodsFunc, sources config.SourcesReady,
			containers containermap.ContainerMap, running sets.Set[string],
		) error {
			return m.Start(pods, sources, containers, running)
		},
		Stop: func(m *devicemanager.ManagerImpl) error { return m.Stop() },
		Capacity: func(m *devicemanager.ManagerImpl) (v1.ResourceList, v1.ResourceList, []string) {
			return m.GetCapacity()
		},
		UpdateAllocatedDevices: func(m *devicemanager.ManagerImpl) { m.UpdateAllocatedDevices() },
		Admit: func(
			_ context.Context, t topologymanager.Manager, pod *v1.Pod, others []*v1.Pod,
		) lifecycle.PodAdmitResult {
			return t.Admit(&lifecycle.PodAdmitAttributes{Pod: pod, OtherPods: others})
		},
		ContainerOptions: func(
			_ context.Context, m *devicemanager.ManagerImpl, pod *v1.Pod, container *v1.Container,
		) (*devicemanager.DeviceRunContainerOptions, error) {
			return m.GetDeviceRunContainerOptions(pod, container)
		},
		PodResources: func(
			ctx context.Context, pods podresources.PodsProvider, m *devicemanager.ManagerImpl,
		) podresourcesv1.PodResourcesListerServer {
			return podresources.NewV1PodResourcesServer(ctx, podresources.PodResourcesProviders{
				Pods: pods, Devices: devices{m}, Cpus: nothing{}, Memory: nothing{}, DynamicResources: nothing{},
			})
		},
	})
}

type devices struct{ manager *devicemanager.ManagerImpl }

func (d devices) UpdateAllocatedDevices() { d.manager.UpdateAllocatedDevices() }

func (d devices) GetDevices(podUID, containerName string) []*podresourcesv1.ContainerDevices {
	return devicenode.ContainerDevices(d.manager.GetDevices(podUID, containerName))
}

func (d devices) GetAllocatableDevices() []*podresourcesv1.ContainerDevices {
	return devicenode.ContainerDevices(d.manager.GetAllocatableDevices())
}

// nothing stands for the managers that this program does not run.
type nothing struct{}

func (nothing) GetCPUs(string, string) []int64 { return nil }

func (nothing) GetAllocatableCPUs() []int64 { return nil }

func (nothing) GetMemory(string, string) []*podresourcesv1.ContainerMemory {
	return nil
}

func (nothing) GetAllocatableMemory() []*podresourcesv1.ContainerMemory { return nil }

func (nothing) GetDynamicResources(*v1.Pod, *v1.Container) []*podresourcesv1.DynamicResource {
	return nil
}
