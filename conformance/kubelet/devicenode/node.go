// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package devicenode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/checkpointmanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager/checkpoint"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// checkpointName is the file the device manager keeps beside its sockets.
// Source: kubernetes pkg/kubelet/cm/devicemanager/types.go.
const checkpointName = "kubelet_internal_checkpoint"

// containerScope is the kubelet's default for topologyManagerScope.
const containerScope = "container"

// pollInterval is how often wait looks; it bounds the error of the time it reports.
const pollInterval = time.Millisecond

var errStopped = errors.New("the device manager is not started")

// rejection is a pod that the kubelet refuses to admit.
type rejection struct{ lifecycle.PodAdmitResult }

func (r rejection) Error() string { return r.Message }

func reasonOf(err error) string {
	var rejected rejection
	if errors.As(err, &rejected) {
		return rejected.Reason
	}
	return "Error"
}

type podSpec struct {
	UID        string          `json:"uid"`
	Name       string          `json:"name"`
	Namespace  string          `json:"namespace"`
	Containers []containerSpec `json:"containers"`
}

type containerSpec struct {
	Name      string           `json:"name"`
	Resources map[string]int64 `json:"resources"`
	// Running says, at start, that the container runtime reports the container as running.
	Running bool `json:"running"`
}

// pod makes the API object that the managers read: identity, and requests equal to limits.
func (p podSpec) pod() *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: types.UID(p.UID), Name: p.Name, Namespace: p.Namespace}}
	for _, c := range p.Containers {
		wanted := v1.ResourceList{}
		for name, count := range c.Resources {
			wanted[v1.ResourceName(name)] = *resource.NewQuantity(count, resource.DecimalSI)
		}
		pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{
			Name:      c.Name,
			Resources: v1.ResourceRequirements{Requests: wanted, Limits: wanted},
		})
	}
	return pod
}

// node is what the rest of a kubelet would know: the active pods, and whether all pod sources have been seen.
type node struct {
	release Release

	mutex sync.Mutex
	pods  map[string]*v1.Pod
	ready bool

	manager  *devicemanager.ManagerImpl
	topology topologymanager.Manager
}

func (n *node) activePods() []*v1.Pod {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	pods := make([]*v1.Pod, 0, len(n.pods))
	for _, pod := range n.pods {
		pods = append(pods, pod)
	}
	return pods
}

func (n *node) setActive(pod *v1.Pod) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.pods[string(pod.UID)] = pod
}

func (n *node) setGone(uid string) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	delete(n.pods, uid)
}

func (n *node) lookUp(uid string) (*v1.Pod, bool) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	pod, known := n.pods[uid]
	return pod, known
}

// AddSource and AllReady make node the kubelet's SourcesReady.
func (n *node) AddSource(string) {}

func (n *node) AllReady() bool {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	return n.ready
}

type startParameters struct {
	// Pods are active from the start, as after a kubelet restart.
	Pods []podSpec `json:"pods"`
	// SourcesPending leaves the pod sources unseen until the operation sources-ready.
	SourcesPending bool `json:"sources_pending"`
	// NUMANodes of the machine, numbered from 0; none is one node.
	NUMANodes int `json:"numa_nodes"`
	// Policy of the topology manager; empty is none.
	Policy string `json:"policy"`
	Scope  string `json:"scope"`
}

// start does what a starting kubelet does for devices: read the checkpoint, delete every socket of the
// directory, and serve registration. A pod stays active over stop and start of one process.
func (n *node) start(_ context.Context, p startParameters) (any, error) {
	if n.manager != nil {
		return nil, errors.New("the device manager is started already")
	}
	// The kubelet has /var/lib/kubelet made before the managers start.
	if err := os.MkdirAll(pluginapi.DevicePluginPath, 0o750); err != nil {
		return nil, err
	}
	if p.Policy == "" {
		p.Policy = topologymanager.PolicyNone
	}
	if p.Scope == "" {
		p.Scope = containerScope
	}
	containers := containermap.NewContainerMap()
	running := sets.New[string]()
	for _, spec := range p.Pods {
		n.setActive(spec.pod())
		for _, c := range spec.Containers {
			id := "containerd://" + spec.UID + "-" + c.Name
			containers.Add(spec.UID, c.Name, id)
			if c.Running {
				running.Insert(id)
			}
		}
	}
	n.mutex.Lock()
	n.ready = !p.SourcesPending
	n.mutex.Unlock()

	topology, err := n.release.NewTopologyManager(max(p.NUMANodes, 1), p.Policy, p.Scope)
	if err != nil {
		return nil, err
	}
	manager, err := n.release.NewDeviceManager(max(p.NUMANodes, 1), topology)
	if err != nil {
		return nil, err
	}
	n.release.AddHintProvider(topology, manager)
	if err := n.release.Start(manager, n.activePods, n, containers, running); err != nil {
		return nil, err
	}
	n.manager, n.topology = manager, topology
	return map[string]any{"monotonic_ns": monotonic()}, nil
}

// stop ends the registration service and every plugin connection. The checkpoint stays.
func (n *node) stop(context.Context) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	err := n.release.Stop(n.manager)
	n.manager, n.topology = nil, nil
	return nil, err
}

func (n *node) sourcesAreReady(context.Context) (any, error) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.ready = true
	return nil, nil
}

// capacity is what the kubelet would write into the node status.
func (n *node) capacity(context.Context) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	capacity, allocatable, removed := n.release.Capacity(n.manager)
	return map[string]any{
		"capacity":    counts(capacity),
		"allocatable": counts(allocatable),
		"removed":     sorted(removed),
	}, nil
}

func counts(list v1.ResourceList) map[string]int64 {
	counted := make(map[string]int64, len(list))
	for name, quantity := range list {
		counted[string(name)] = quantity.Value()
	}
	return counted
}

func sorted(names []string) []string {
	ordered := append([]string{}, names...)
	slices.Sort(ordered)
	return ordered
}

func (n *node) devices(context.Context) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	return deviceState(n.manager)
}

type waitParameters struct {
	Resource string `json:"resource"`
	// Healthy and Unhealthy are the wanted sets of ids, or how many; absent is any.
	Healthy   *expectation `json:"healthy"`
	Unhealthy *expectation `json:"unhealthy"`
	TimeoutMS int          `json:"timeout_ms"`
}

// expectation is a set of ids or their number.
type expectation struct {
	ids    []string
	number int
}

func (e *expectation) UnmarshalJSON(data []byte) error {
	e.number = -1
	if json.Unmarshal(data, &e.number) == nil {
		return nil
	}
	e.ids = []string{}
	return json.Unmarshal(data, &e.ids)
}

func (e *expectation) met(ids []string) bool {
	if e == nil {
		return true
	}
	if e.ids != nil {
		return slices.Equal(sorted(e.ids), ids)
	}
	return e.number == len(ids)
}

// wait returns as soon as the manager holds the wanted sets, with the time (CLOCK_MONOTONIC) at which it did.
func (n *node) wait(_ context.Context, p waitParameters) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	deadline := time.Now().Add(time.Duration(p.TimeoutMS) * time.Millisecond)
	for {
		all, err := deviceState(n.manager)
		if err != nil {
			return nil, err
		}
		held := all[p.Resource]
		if held != nil && p.Healthy.met(held.Healthy) && p.Unhealthy.met(held.Unhealthy) {
			return map[string]any{"devices": held, "monotonic_ns": monotonic()}, nil
		}
		if time.Now().After(deadline) {
			seen, _ := json.Marshal(held)
			return nil, fmt.Errorf("%s: not as wanted after %d ms, observed %s", p.Resource, p.TimeoutMS, seen)
		}
		time.Sleep(pollInterval)
	}
}

func monotonic() int64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now)
	return now.Nano()
}

type podParameters struct {
	Pod podSpec `json:"pod"`
}

// allocate admits a pod through the topology manager, which calls the device manager for each container, and
// answers what the container runtime would be given. A pod that is refused is not active afterwards. For a pod
// that has its devices already it does what the kubelet does at each start of it.
func (n *node) allocate(ctx context.Context, p podParameters) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	pod := p.Pod.pod()
	n.setGone(p.Pod.UID)
	others := n.activePods()
	n.setActive(pod)
	result := n.release.Admit(ctx, n.topology, pod, others)
	if !result.Admit {
		n.setGone(p.Pod.UID)
		n.release.UpdateAllocatedDevices(n.manager)
		return nil, rejection{result}
	}
	answered := map[string]any{}
	for i := range pod.Spec.Containers {
		given, err := n.runOptions(ctx, pod, &pod.Spec.Containers[i])
		if err != nil {
			return nil, err
		}
		answered[pod.Spec.Containers[i].Name] = given
	}
	return answered, nil
}

type containerParameters struct {
	UID  string `json:"uid"`
	Name string `json:"container"`
}

// container answers what the runtime would be given when the kubelet starts the container of an active pod again.
func (n *node) container(ctx context.Context, p containerParameters) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	pod, known := n.lookUp(p.UID)
	if !known {
		return nil, fmt.Errorf("pod %s is not active", p.UID)
	}
	for i := range pod.Spec.Containers {
		if pod.Spec.Containers[i].Name == p.Name {
			return n.runOptions(ctx, pod, &pod.Spec.Containers[i])
		}
	}
	return nil, fmt.Errorf("pod %s has no container %s", p.UID, p.Name)
}

type runOptions struct {
	// DeviceIDs the kubelet booked, by resource.
	DeviceIDs   map[string][]string `json:"device_ids"`
	CDI         []string            `json:"cdi"`
	Envs        map[string]string   `json:"envs"`
	Annotations map[string]string   `json:"annotations"`
	Devices     []string            `json:"devices"`
	Mounts      []string            `json:"mounts"`
}

func (n *node) runOptions(ctx context.Context, pod *v1.Pod, c *v1.Container) (*runOptions, error) {
	given, err := n.release.ContainerOptions(ctx, n.manager, pod, c)
	if err != nil {
		return nil, err
	}
	answered := &runOptions{
		DeviceIDs: map[string][]string{}, CDI: []string{}, Envs: map[string]string{}, Annotations: map[string]string{},
		Devices: []string{}, Mounts: []string{},
	}
	for name, instances := range n.manager.GetDevices(string(pod.UID), c.Name) {
		ids := []string{}
		for id := range instances {
			ids = append(ids, id)
		}
		answered.DeviceIDs[name] = sorted(ids)
	}
	if given == nil {
		return answered, nil
	}
	for _, device := range given.CDIDevices {
		answered.CDI = append(answered.CDI, device.Name)
	}
	for _, env := range given.Envs {
		answered.Envs[env.Name] = env.Value
	}
	for _, annotation := range given.Annotations {
		answered.Annotations[annotation.Name] = annotation.Value
	}
	for _, device := range given.Devices {
		answered.Devices = append(answered.Devices, device.PathOnHost)
	}
	for _, mount := range given.Mounts {
		answered.Mounts = append(answered.Mounts, mount.HostPath)
	}
	return answered, nil
}

type freeParameters struct {
	UID string `json:"uid"`
}

// free takes a pod off the active list, as its end does, and lets the manager reclaim.
func (n *node) free(_ context.Context, p freeParameters) (any, error) {
	if n.manager == nil {
		return nil, errStopped
	}
	if _, known := n.lookUp(p.UID); !known {
		return nil, fmt.Errorf("pod %s is not active", p.UID)
	}
	n.setGone(p.UID)
	n.release.UpdateAllocatedDevices(n.manager)
	return nil, nil
}

type checkpointEntry struct {
	PodUID    string   `json:"pod_uid"`
	Container string   `json:"container"`
	Resource  string   `json:"resource"`
	DeviceIDs []string `json:"device_ids"`
	CDI       []string `json:"cdi"`
}

// checkpoint reads the file with the kubelet's own code, checksum included. It needs no started manager.
func (n *node) checkpoint(context.Context) (any, error) {
	store, err := checkpointmanager.NewCheckpointManager(pluginapi.DevicePluginPath)
	if err != nil {
		return nil, err
	}
	held := checkpoint.New(nil, map[string][]string{})
	if err := store.GetCheckpoint(checkpointName, held); err != nil {
		return nil, err
	}
	booked, registered := held.GetData()
	entries := []checkpointEntry{}
	for _, b := range booked {
		answered := &pluginapi.ContainerAllocateResponse{}
		if err := proto.Unmarshal(b.AllocResp, answered); err != nil {
			return nil, err
		}
		entry := checkpointEntry{
			PodUID: b.PodUID, Container: b.ContainerName, Resource: b.ResourceName,
			DeviceIDs: sorted(b.DeviceIDs.Devices().UnsortedList()), CDI: []string{},
		}
		for _, device := range answered.CdiDevices {
			entry.CDI = append(entry.CDI, device.Name)
		}
		entries = append(entries, entry)
	}
	slices.SortFunc(entries, func(a, b checkpointEntry) int {
		return slices.Compare([]string{a.PodUID, a.Container, a.Resource}, []string{b.PodUID, b.Container, b.Resource})
	})
	for name := range registered {
		registered[name] = sorted(registered[name])
	}
	return map[string]any{"pods": entries, "registered": registered}, nil
}
