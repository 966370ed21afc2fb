// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package devicenode

import (
	"fmt"
	"reflect"
	"sync"
	"unsafe"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
)

// resourceState is what the manager holds for one resource. Ids are sorted.
type resourceState struct {
	Healthy   []string `json:"healthy"`
	Unhealthy []string `json:"unhealthy"`
	Allocated []string `json:"allocated"`
	// NUMA nodes of each listed device that has a topology.
	NUMA map[string][]int64 `json:"numa"`
}

// private returns an unexported field of the manager. The unhealthy set is the one thing that the tests need and
// that no exported method gives. Only ever read, and only under the manager's mutex.
func private[T any](manager *devicemanager.ManagerImpl, name string) (*T, error) {
	field := reflect.ValueOf(manager).Elem().FieldByName(name)
	if !field.IsValid() || field.Type() != reflect.TypeFor[T]() {
		return nil, fmt.Errorf("this kubelet's device manager has no field %s of type %v", name, reflect.TypeFor[T]())
	}
	return (*T)(unsafe.Pointer(field.UnsafeAddr())), nil
}

func deviceState(manager *devicemanager.ManagerImpl) (map[string]*resourceState, error) {
	mutex, err := private[sync.Mutex](manager, "mutex")
	if err != nil {
		return nil, err
	}
	healthy, err := private[map[string]sets.Set[string]](manager, "healthyDevices")
	if err != nil {
		return nil, err
	}
	unhealthy, err := private[map[string]sets.Set[string]](manager, "unhealthyDevices")
	if err != nil {
		return nil, err
	}
	allocated, err := private[map[string]sets.Set[string]](manager, "allocatedDevices")
	if err != nil {
		return nil, err
	}
	listed, err := private[devicemanager.ResourceDeviceInstances](manager, "allDevices")
	if err != nil {
		return nil, err
	}

	mutex.Lock()
	defer mutex.Unlock()
	state := map[string]*resourceState{}
	of := func(name string) *resourceState {
		if state[name] == nil {
			state[name] = &resourceState{
				Healthy: []string{}, Unhealthy: []string{}, Allocated: []string{}, NUMA: map[string][]int64{},
			}
		}
		return state[name]
	}
	for name, ids := range *healthy {
		of(name).Healthy = append([]string{}, sets.List(ids)...)
	}
	for name, ids := range *unhealthy {
		of(name).Unhealthy = append([]string{}, sets.List(ids)...)
	}
	for name, ids := range *allocated {
		of(name).Allocated = append([]string{}, sets.List(ids)...)
	}
	for name, instances := range *listed {
		for id, device := range instances {
			for _, at := range device.GetTopology().GetNodes() {
				of(name).NUMA[id] = append(of(name).NUMA[id], at.GetID())
			}
		}
	}
	return state, nil
}
