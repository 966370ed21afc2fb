// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Package resolver asks a release of the reference CDI library what it makes of
// the files in CDI directories.
//
// It is driven by JSON objects, one per line, on standard input, and answers
// each with one line on standard output, {"ok": true, "result": ...} or
// {"ok": false, "error": ...}:
//
//	{"op": "open", "dirs": [...], "watch": false}  read these directories, the last has the highest priority;
//	                                               watch is the library's own following of changes
//	{"op": "refresh"}                              read them again; answers the errors by file, and the error, if any,
//	                                               that a caller of Refresh sees
//	{"op": "devices"}                              the qualified names that can be resolved
//	{"op": "inject", "devices": [...]}             the device nodes and cgroup rules that injection adds
//	{"op": "hammer", "devices": [...], "ms": N}    refresh and inject in a loop for so long; counts what went wrong
//	{"op": "version"}                              the module and its version
package resolver

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	oci "github.com/opencontainers/runtime-spec/specs-go"
)

// Cache is what both releases of the library offer.
type Cache interface {
	Refresh() error
	GetErrors() map[string][]error
	GetSpecDirErrors() map[string]error
	ListDevices() []string
	InjectDevices(spec *oci.Spec, devices ...string) ([]string, error)
}

// Library is one release.
type Library struct {
	// Module is the path under which the release is published.
	Module string
	Open   func(dirs []string, watch bool) (Cache, error)
}

type request struct {
	Op      string   `json:"op"`
	Dirs    []string `json:"dirs"`
	Watch   bool     `json:"watch"`
	Devices []string `json:"devices"`
	MS      int      `json:"ms"`
}

type reply struct {
	OK     bool   `json:"ok"`
	Result any    `json:"result,omitempty"`
	Error  string `json:"error,omitempty"`
}

type node struct {
	Path        string `json:"path"`
	Type        string `json:"type"`
	Major       int64  `json:"major"`
	Minor       int64  `json:"minor"`
	Permissions string `json:"permissions"`
}

var errNotOpen = errors.New("no directories are open")

// Main is the whole program, for one release of the library.
func Main(library Library) {
	out := json.NewEncoder(os.Stdout)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 0, 64<<10), 16<<20)
	var cache Cache
	for lines.Scan() {
		result, err := answer(library, &cache, lines.Bytes())
		answered := reply{OK: err == nil, Result: result}
		if err != nil {
			answered.Error = err.Error()
		}
		if out.Encode(answered) != nil {
			os.Exit(1) // whoever drove us is gone
		}
	}
}

func answer(library Library, open *Cache, line []byte) (result any, err error) {
	// Some files make some releases panic, which ends whoever asked; here it is an answer.
	defer func() {
		if problem := recover(); problem != nil {
			err = fmt.Errorf("panic: %v", problem)
		}
	}()
	var asked request
	if err := json.Unmarshal(line, &asked); err != nil {
		return nil, err
	}
	cache := *open
	switch asked.Op {
	case "version":
		return version(library.Module)
	case "open":
		*open = nil
		*open, err = library.Open(asked.Dirs, asked.Watch)
		return nil, err
	}
	if cache == nil {
		return nil, errNotOpen
	}
	switch asked.Op {
	case "refresh":
		return refresh(cache), nil
	case "devices":
		return append([]string{}, cache.ListDevices()...), nil
	case "inject":
		return inject(cache, asked.Devices)
	case "hammer":
		return hammer(cache, asked.Devices, time.Duration(asked.MS)*time.Millisecond), nil
	}
	return nil, fmt.Errorf("no operation %q", asked.Op)
}

func refresh(cache Cache) map[string]any {
	fatal := ""
	if err := cache.Refresh(); err != nil {
		fatal = err.Error()
	}
	files := map[string][]string{}
	for path, problems := range cache.GetErrors() {
		for _, problem := range problems {
			files[path] = append(files[path], problem.Error())
		}
	}
	dirs := map[string]string{}
	for path, problem := range cache.GetSpecDirErrors() {
		dirs[path] = problem.Error()
	}
	return map[string]any{"error": fatal, "files": files, "dirs": dirs}
}

// inject adds the devices to an empty OCI configuration. The library stats each node, as it does for a container.
func inject(cache Cache, devices []string) ([]node, error) {
	spec := &oci.Spec{}
	if _, err := cache.InjectDevices(spec, devices...); err != nil {
		return nil, err
	}
	nodes := []node{}
	if spec.Linux == nil {
		return nodes, nil
	}
	for _, device := range spec.Linux.Devices {
		nodes = append(nodes, node{
			Path: device.Path, Type: device.Type, Major: device.Major, Minor: device.Minor,
			Permissions: permissions(spec, device),
		})
	}
	return nodes, nil
}

// permissions are those of the cgroup rules that allow exactly this device.
func permissions(spec *oci.Spec, device oci.LinuxDevice) string {
	if spec.Linux.Resources == nil {
		return ""
	}
	var allowed []string
	for _, rule := range spec.Linux.Resources.Devices {
		if rule.Allow && rule.Type == device.Type && rule.Major != nil && *rule.Major == device.Major &&
			rule.Minor != nil && *rule.Minor == device.Minor {
			allowed = append(allowed, rule.Access)
		}
	}
	return strings.Join(allowed, "+")
}

// hammer is a consumer that never rests. What it finds wrong in a file is wrong whatever the moment: torn text, an
// unknown version, a conflict. A device that can't be injected is counted apart, since a device may just be leaving.
func hammer(cache Cache, devices []string, duration time.Duration) map[string]any {
	rounds, missing := 0, 0
	wrong, failed := []string{}, []string{}
	remember := func(list []string, text string) []string {
		if len(list) < 20 && !slices.Contains(list, text) {
			list = append(list, text)
		}
		return list
	}
	for end := time.Now().Add(duration); time.Now().Before(end); rounds++ {
		_ = cache.Refresh()
		for _, problems := range cache.GetErrors() {
			for _, problem := range problems {
				wrong = remember(wrong, problem.Error())
			}
		}
		for _, device := range devices {
			if unresolved, err := cache.InjectDevices(&oci.Spec{}, device); err != nil {
				if len(unresolved) > 0 {
					missing++
				}
				failed = remember(failed, err.Error())
			}
		}
	}
	return map[string]any{"rounds": rounds, "wrong": wrong, "failed": failed, "missing": missing}
}

func version(module string) (any, error) {
	info, known := debug.ReadBuildInfo()
	if !known {
		return nil, errors.New("built without module information")
	}
	for _, dep := range info.Deps {
		if dep.Path == module {
			return map[string]string{"module": module, "version": dep.Version, "go": info.GoVersion}, nil
		}
	}
	return nil, fmt.Errorf("module %s is not compiled in", module)
}
