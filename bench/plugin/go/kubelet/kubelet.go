// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"sync"
	"time"

	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	plugin "k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/plugin/v1beta1"
)

const socketName = "kubelet.sock"

// How the socket of a new kubelet comes to be.
const (
	// emptied: every socket in the directory is removed first, as a kubelet does.
	emptied = "emptied"
	// alone: only a dead kubelet.sock is removed; the plugins' sockets stay.
	alone = "alone"
)

type kubelet struct {
	mutex     sync.Mutex
	changed   *sync.Cond
	server    plugin.Server
	order     string
	listenNs  int64
	resources map[string]*resource
	// totals holds how many devices were healthy, over all resources, after each list.
	totals []total
}

type resource struct {
	client       plugin.DevicePlugin
	registeredNs int64
	devices      []*api.Device
}

type total struct {
	atNs    int64
	healthy int
	devices int
}

func newKubelet() *kubelet {
	k := &kubelet{resources: map[string]*resource{}}
	k.changed = sync.NewCond(&k.mutex)
	return k
}

type startRequest struct {
	Dir   string `json:"dir"`
	Order string `json:"order"`
}

// start makes the socket and returns when that was: the moment before it listens.
func (k *kubelet) start(_ context.Context, request startRequest) (any, error) {
	if k.server != nil {
		return nil, errors.New("started already; a new kubelet is a new process")
	}
	if request.Order != emptied && request.Order != alone {
		return nil, fmt.Errorf("order %q, expected %s or %s", request.Order, emptied, alone)
	}
	k.order = request.Order
	server, err := plugin.NewServer(klog.Background(), filepath.Join(request.Dir, socketName), k, k)
	if err != nil {
		return nil, err
	}
	if err := server.Start(klog.Background()); err != nil {
		return nil, err
	}
	k.server = server
	return map[string]int64{"at_ns": k.listenNs}, nil
}

// CleanupPluginDirectory is called by the kubelet's server right before it listens.
func (k *kubelet) CleanupPluginDirectory(_ klog.Logger, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket == 0 || (k.order == alone && entry.Name() != socketName) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	k.listenNs = monotonicNs()
	return nil
}

// PluginConnected is called inside a plugin's Register, after dialling back.
func (k *kubelet) PluginConnected(ctx context.Context, name string, client plugin.DevicePlugin) error {
	// The first thing that a device manager asks; without an answer there is no registration.
	if _, err := client.API().GetDevicePluginOptions(ctx, &api.Empty{}); err != nil {
		return fmt.Errorf("failed to get device plugin options: %w", err)
	}
	k.mutex.Lock()
	defer k.mutex.Unlock()
	k.resources[name] = &resource{client: client, registeredNs: monotonicNs()}
	k.changed.Broadcast()
	return nil
}

// PluginDisconnected is called when a stream ended.
func (k *kubelet) PluginDisconnected(_ klog.Logger, name, socketPath string) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	if known := k.resources[name]; known != nil && known.client.SocketPath() == socketPath {
		delete(k.resources, name)
		k.count(monotonicNs())
	}
}

// PluginListAndWatchReceiver is called with every list that a plugin sends.
func (k *kubelet) PluginListAndWatchReceiver(_ klog.Logger, name string, list *api.ListAndWatchResponse) {
	atNs := monotonicNs()
	k.mutex.Lock()
	defer k.mutex.Unlock()
	if known := k.resources[name]; known != nil {
		known.devices = list.Devices
		k.count(atNs)
	}
}

func (k *kubelet) count(atNs int64) {
	now := total{atNs: atNs}
	for _, known := range k.resources {
		now.devices += len(known.devices)
		for _, device := range known.devices {
			if device.Health == api.Healthy {
				now.healthy++
			}
		}
	}
	k.totals = append(k.totals, now)
	k.changed.Broadcast()
}

type waitRequest struct {
	Healthy  int   `json:"healthy"`
	AfterNs  int64 `json:"after_ns"`
	WithinMs int64 `json:"within_ms"`
}

// wait returns when, after a moment, the number of healthy devices over all resources was first as asked. `met` is
// false when that did not come to pass in time.
func (k *kubelet) wait(_ context.Context, request waitRequest) (any, error) {
	late := false
	timer := time.AfterFunc(time.Duration(request.WithinMs)*time.Millisecond, func() {
		k.mutex.Lock()
		defer k.mutex.Unlock()
		late = true
		k.changed.Broadcast()
	})
	defer timer.Stop()
	k.mutex.Lock()
	defer k.mutex.Unlock()
	for {
		first := sort.Search(len(k.totals), func(i int) bool { return k.totals[i].atNs >= request.AfterNs })
		for _, seen := range k.totals[first:] {
			if seen.healthy == request.Healthy {
				return k.described(seen.atNs, true), nil
			}
		}
		if late {
			return k.described(0, false), nil
		}
		k.changed.Wait()
	}
}

type state struct {
	Met        bool                `json:"met"`
	AtNs       int64               `json:"at_ns"`
	Healthy    int                 `json:"healthy"`
	Registered map[string]int64    `json:"registered"`
	Devices    map[string][]string `json:"devices,omitempty"`
	Numa       int                 `json:"numa,omitempty"`
}

func (k *kubelet) described(atNs int64, met bool) state {
	described := state{Met: met, AtNs: atNs, Registered: map[string]int64{}}
	for name, known := range k.resources {
		described.Registered[name] = known.registeredNs
	}
	if len(k.totals) > 0 {
		described.Healthy = k.totals[len(k.totals)-1].healthy
	}
	return described
}

// state returns the healthy devices of every resource, and how many devices say which NUMA node they are on.
func (k *kubelet) state(_ context.Context, _ struct{}) (any, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	described := k.described(monotonicNs(), true)
	described.Devices = map[string][]string{}
	for name, known := range k.resources {
		described.Devices[name] = []string{}
		for _, device := range known.devices {
			if device.Health == api.Healthy {
				described.Devices[name] = append(described.Devices[name], device.ID)
			}
			if device.Topology != nil && len(device.Topology.Nodes) > 0 {
				described.Numa++
			}
		}
	}
	return described, nil
}

type allocateRequest struct {
	Resource string     `json:"resource"`
	Ids      [][]string `json:"ids"`
	Count    int        `json:"count"`
	Unmeant  int        `json:"warm_up"`
}

type allocation struct {
	Ns []int64 `json:"ns"`
	// Named is how many things the last answer hands to the container runtime.
	Named int `json:"named"`
}

// allocate calls Allocate so often, one call after the other, going round the id sets; one container each.
func (k *kubelet) allocate(ctx context.Context, request allocateRequest) (any, error) {
	client, err := k.client(request.Resource)
	if err != nil {
		return nil, err
	}
	result := allocation{Ns: make([]int64, 0, request.Count)}
	for i := -request.Unmeant; i < request.Count; i++ {
		ids := request.Ids[(i+request.Unmeant)%len(request.Ids)]
		call := &api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}}
		began := monotonicNs()
		response, err := client.Allocate(ctx, call)
		took := monotonicNs() - began
		if err != nil {
			return nil, err
		}
		if i < 0 {
			continue
		}
		result.Ns = append(result.Ns, took)
		result.Named = 0
		for _, container := range response.ContainerResponses {
			result.Named += len(container.CdiDevices) + len(container.Devices) + len(container.Mounts) +
				len(container.Envs) + len(container.Annotations)
		}
	}
	return result, nil
}

type refusalRequest struct {
	Resource string `json:"resource"`
	ID       string `json:"id"`
}

// refusal returns how a plugin answers to an id that it never listed.
func (k *kubelet) refusal(ctx context.Context, request refusalRequest) (any, error) {
	client, err := k.client(request.Resource)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	_, err = client.Allocate(ctx, &api.AllocateRequest{
		ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: []string{request.ID}}},
	})
	answered := status.Convert(err)
	return map[string]string{"code": answered.Code().String(), "message": answered.Message()}, nil
}

func (k *kubelet) client(name string) (api.DevicePluginClient, error) {
	k.mutex.Lock()
	defer k.mutex.Unlock()
	known := k.resources[name]
	if known == nil {
		return nil, fmt.Errorf("no plugin of %s is connected", name)
	}
	return known.client.API(), nil
}
