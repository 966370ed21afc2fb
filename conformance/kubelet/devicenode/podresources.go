// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package devicenode

import (
	"context"

	v1 "k8s.io/api/core/v1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

type podResourcesParameters struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

// podResources asks the kubelet's pod-resources service for one pod, which is the call that Kata makes when it
// cold-plugs, and answers container name, resource name, device ids.
func (n *node) podResources(ctx context.Context, p podResourcesParameters) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	service := n.release.PodResources(ctx, n, n.manager)
	got, err := service.Get(ctx, &podresourcesv1.GetPodResourcesRequest{PodName: p.Name, PodNamespace: p.Namespace})
	if err != nil {
		return nil, err
	}
	answered := map[string]map[string][]string{}
	for _, container := range got.GetPodResources().GetContainers() {
		held := map[string][]string{}
		for _, devices := range container.GetDevices() {
			held[devices.GetResourceName()] = sorted(append(held[devices.GetResourceName()], devices.GetDeviceIds()...))
		}
		answered[container.GetName()] = held
	}
	return answered, nil
}

// GetActivePods, GetPods and GetPodByName make node the service's source of pods.
func (n *node) GetActivePods() []*v1.Pod { return n.activePods() }

func (n *node) GetPods() []*v1.Pod { return n.activePods() }

func (n *node) GetPodByName(namespace, name string) (*v1.Pod, bool) {
	for _, pod := range n.activePods() {
		if pod.Namespace == namespace && pod.Name == name {
			return pod, true
		}
	}
	return nil, false
}

// ContainerDevices puts the device manager's answer into the form of the service, one entry per device, as the
// kubelet's container manager does.
func ContainerDevices(instances devicemanager.ResourceDeviceInstances) []*podresourcesv1.ContainerDevices {
	var listed []*podresourcesv1.ContainerDevices
	for name, devices := range instances {
		for id := range devices {
			listed = append(listed, &podresourcesv1.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
		}
	}
	return listed
}
