// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

package devicenode

import (
	"errors"
	"runtime/debug"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

type field struct {
	Name   string `json:"name"`
	Number int    `json:"number"`
	// Type is the proto keyword, or the message's name, or map<key, value>.
	Type     string `json:"type"`
	Repeated bool   `json:"repeated"`
}

type method struct {
	Name     string `json:"name"`
	Request  string `json:"request"`
	Response string `json:"response"`
	Stream   bool   `json:"stream"`
}

type api struct {
	Package  string              `json:"package"`
	Syntax   string              `json:"syntax"`
	Messages map[string][]field  `json:"messages"`
	Services map[string][]method `json:"services"`
	// Constants that are no part of the protocol's file.
	Constants map[string]string `json:"constants"`
}

// schema describes the device plugin API as the kubelet's compiled code has it.
func schema() api {
	file := new(pluginapi.Empty).ProtoReflect().Descriptor().ParentFile()
	described := api{
		Package:  string(file.Package()),
		Syntax:   file.Syntax().String(),
		Messages: map[string][]field{},
		Services: map[string][]method{},
		Constants: map[string]string{
			"version": pluginapi.Version, "healthy": pluginapi.Healthy, "unhealthy": pluginapi.Unhealthy,
			"plugin_path": pluginapi.DevicePluginPath, "kubelet_socket": pluginapi.KubeletSocket,
		},
	}
	for i := range file.Messages().Len() {
		message := file.Messages().Get(i)
		fields := []field{}
		for j := range message.Fields().Len() {
			f := message.Fields().Get(j)
			fields = append(fields, field{
				Name: string(f.Name()), Number: int(f.Number()), Type: typeOf(f), Repeated: f.IsList(),
			})
		}
		described.Messages[string(message.Name())] = fields
	}
	for i := range file.Services().Len() {
		service := file.Services().Get(i)
		methods := []method{}
		for j := range service.Methods().Len() {
			m := service.Methods().Get(j)
			methods = append(methods, method{
				Name: string(m.Name()), Request: string(m.Input().Name()), Response: string(m.Output().Name()),
				Stream: m.IsStreamingServer(),
			})
		}
		described.Services[string(service.Name())] = methods
	}
	return described
}

func typeOf(f protoreflect.FieldDescriptor) string {
	if f.IsMap() {
		return "map<" + typeOf(f.MapKey()) + ", " + typeOf(f.MapValue()) + ">"
	}
	if f.Kind() == protoreflect.MessageKind {
		return string(f.Message().Name())
	}
	return f.Kind().String()
}

// versions says which modules were compiled in, from the binary itself.
func versions() (any, error) {
	info, known := debug.ReadBuildInfo()
	if !known {
		return nil, errors.New("built without module information")
	}
	modules := map[string]string{}
	for _, dep := range info.Deps {
		used := dep
		if dep.Replace != nil {
			used = dep.Replace
		}
		if strings.HasPrefix(dep.Path, "k8s.io/") {
			modules[dep.Path] = used.Version
		}
	}
	return map[string]any{"go": info.GoVersion, "kubernetes": modules["k8s.io/kubernetes"], "modules": modules}, nil
}
