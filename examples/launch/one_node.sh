#!/usr/bin/env bash
# Trains on one machine with 8 GPUs; the run starts its own Ray and ends it.
#   bash examples/launch/one_node.sh [key=value …]
set -euo pipefail
cd "$(dirname "$0")/../.."

CONFIG=${CONFIG:-configs/rlvr_8gpu_colocated.yaml}
roll-like run --config "$CONFIG" --check "$@"
exec roll-like run --config "$CONFIG" "$@"
