// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package devicenode

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/apis/podresources"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// Release is the part of the kubelet's interface whose parameters differ between releases. Each field is one call
// of the kubelet's own code, nothing more.
type Release struct {
	NewTopologyManager     func(numaNodes int, policy, scope string) (topologymanager.Manager, error)
	NewDeviceManager       func(numaNodes int, topology topologymanager.Manager) (*devicemanager.ManagerImpl, error)
	AddHintProvider        func(topologymanager.Manager, *devicemanager.ManagerImpl)
	Start                  func(*devicemanager.ManagerImpl, devicemanager.ActivePodsFunc, config.SourcesReady, containermap.ContainerMap, sets.Set[string]) error
	Stop                   func(*devicemanager.ManagerImpl) error
	Capacity               func(*devicemanager.ManagerImpl) (capacity, allocatable v1.ResourceList, removed []string)
	UpdateAllocatedDevices func(*devicemanager.ManagerImpl)
	Admit                  func(ctx context.Context, topology topologymanager.Manager, pod *v1.Pod, others []*v1.Pod) lifecycle.PodAdmitResult
	ContainerOptions       func(context.Context, *devicemanager.ManagerImpl, *v1.Pod, *v1.Container) (*devicemanager.DeviceRunContainerOptions, error)
	PodResources           func(context.Context, podresources.PodsProvider, *devicemanager.ManagerImpl) podresourcesv1.PodResourcesListerServer
}
