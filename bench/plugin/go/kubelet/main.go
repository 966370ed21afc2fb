// SPDX-FileCopyrightText: The kata-devices Authors
// SPDX-License-Identifier: Apache-2.0

// Command kubelet is the side of a kubelet that a device plugin sees, with a
// stopwatch. Registration, dialling back and the watched list are the kubelet's
// own code; what is missing is everything behind it.
//
// It is driven by JSON objects, one per line, on standard input:
// {"op": NAME, ...}. It answers each with one line on standard output,
// {"ok": true, "result": ...} or {"ok": false, "error": ...}. Times are
// CLOCK_MONOTONIC in nanoseconds, the same clock for every process of a machine.
// At the end of its input it exits as a killed kubelet does: its socket stays.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// longestLine bounds one request; one that names a thousand devices stays far below.
const longestLine = 4 << 20

type reply struct {
	OK     bool   `json:"ok"`
	Result any    `json:"result,omitempty"`
	Error  string `json:"error,omitempty"`
}

type operation func(*kubelet, context.Context, json.RawMessage) (any, error)

var operations = map[string]operation{
	"start":    with((*kubelet).start),
	"wait":     with((*kubelet).wait),
	"state":    with((*kubelet).state),
	"allocate": with((*kubelet).allocate),
	"refusal":  with((*kubelet).refusal),
}

// with adapts an operation that takes parameters.
func with[P any](do func(*kubelet, context.Context, P) (any, error)) operation {
	return func(k *kubelet, ctx context.Context, line json.RawMessage) (any, error) {
		var parameters P
		if err := json.Unmarshal(line, &parameters); err != nil {
			return nil, err
		}
		return do(k, ctx, parameters)
	}
}

func answer(ctx context.Context, k *kubelet, line []byte) reply {
	var request struct {
		Op string `json:"op"`
	}
	if err := json.Unmarshal(line, &request); err != nil {
		return reply{Error: err.Error()}
	}
	do, known := operations[request.Op]
	if !known {
		return reply{Error: fmt.Sprintf("no operation %q", request.Op)}
	}
	result, err := do(k, ctx, line)
	if err != nil {
		return reply{Error: err.Error()}
	}
	return reply{OK: true, Result: result}
}

func monotonicNs() int64 {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err)
	}
	return now.Nano()
}

func main() {
	defer klog.Flush()
	ctx := context.Background()
	k := newKubelet()
	out := json.NewEncoder(os.Stdout)
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(make([]byte, 0, 64<<10), longestLine)
	for lines.Scan() {
		if err := out.Encode(answer(ctx, k, lines.Bytes())); err != nil {
			os.Exit(1) // whoever drove us is gone
		}
	}
}
