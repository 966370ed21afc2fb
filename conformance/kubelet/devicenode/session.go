// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Package devicenode runs the kubelet's own device manager, topology manager and
// pod-resources service in one process, without the rest of the kubelet.
//
// It is driven by JSON objects, one per line, on standard input:
// {"op": NAME, ...}. It answers each with one line on standard output,
// {"ok": true, "result": ...} or {"ok": false, "error": ..., "reason": ...}.
// The kubelet's log goes to standard error. At the end of its input it exits as
// a killed kubelet does: sockets and checkpoint stay where they are.
//
// The device plugin directory is compiled into the kubelet
// (/var/lib/kubelet/device-plugins), so run it in a mount namespace of its own.
package devicenode

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// longestLine bounds one request; a start with a thousand pods stays far below.
const longestLine = 16 << 20

type reply struct {
	OK     bool   `json:"ok"`
	Result any    `json:"result,omitempty"`
	Error  string `json:"error,omitempty"`
	Reason string `json:"reason,omitempty"`
}

type operation func(*node, context.Context, json.RawMessage) (any, error)

var operations = map[string]operation{
	"start":         with((*node).start),
	"stop":          bare((*node).stop),
	"capacity":      bare((*node).capacity),
	"devices":       bare((*node).devices),
	"wait":          with((*node).wait),
	"allocate":      with((*node).allocate),
	"container":     with((*node).container),
	"free":          with((*node).free),
	"sources-ready": bare((*node).sourcesAreReady),
	"pod-resources": with((*node).podResources),
	"checkpoint":    bare((*node).checkpoint),
	"schema":        bare(func(*node, context.Context) (any, error) { return schema(), nil }),
	"version":       bare(func(*node, context.Context) (any, error) { return versions() }),
}

// with adapts an operation that takes parameters.
func with[P any](do func(*node, context.Context, P) (any, error)) operation {
	return func(n *node, ctx context.Context, line json.RawMessage) (any, error) {
		var parameters P
		if err := json.Unmarshal(line, &parameters); err != nil {
			return nil, err
		}
		return do(n, ctx, parameters)
	}
}

// bare adapts an operation that takes none.
func bare(do func(*node, context.Context) (any, error)) operation {
	return func(n *node, ctx context.Context, _ json.RawMessage) (any, error) { return do(n, ctx) }
}

func answer(ctx context.Context, n *node, line []byte) reply {
	var request struct {
		Op string `json:"op"`
	}
	if err := json.Unmarshal(line, &request); err != nil {
		return reply{Error: err.Error(), Reason: "BadRequest"}
	}
	do, known := operations[request.Op]
	if !known {
		return reply{Error: fmt.Sprintf("no operation %q", request.Op), Reason: "BadRequest"}
	}
	result, err := do(n, ctx, line)
	if err != nil {
		return reply{Error: err.Error(), Reason: reasonOf(err)}
	}
	return reply{OK: true, Result: result}
}

// Main is the whole program, for one release of the kubelet.
func Main(release Release) {
	ask := flag.String("ask", "", "answer one `operation` that needs no manager (schema, version, checkpoint), and exit")
	klog.InitFlags(nil)
	flag.Parse()

	ctx := context.Background()
	out := json.NewEncoder(os.Stdout)
	n := &node{release: release, pods: map[string]*v1.Pod{}}
	if *ask != "" {
		answered := answer(ctx, n, fmt.Appendf(nil, "{\"op\": %q}", *ask))
		if !answered.OK {
			fmt.Fprintln(os.Stderr, answered.Error)
			os.Exit(2)
		}
		out.SetIndent("", "  ")
		_ = out.Encode(answered.Result)
		return
	}

	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 0, 64<<10), longestLine)
	for lines.Scan() {
		if err := out.Encode(answer(ctx, n, lines.Bytes())); err != nil {
			os.Exit(1) // whoever drove us is gone
		}
	}
}
