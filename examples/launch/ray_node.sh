#!/usr/bin/env bash
# Makes this machine a node of a Ray cluster. Run it on every machine, then start the run on the head:
#   bash examples/launch/ray_node.sh head                 # prints the address for the others
#   bash examples/launch/ray_node.sh worker HOST:6379
#   roll-like run --config configs/rlvr_2nodes_disaggregated.yaml
#   bash examples/launch/ray_node.sh stop
# The head makes a token, ~/.ray/auth_token, if there is none: copy that file to the other machines first.
# Variables such as NCCL_SOCKET_IFNAME and HF_HOME reach all workers if they are set here, on every machine.
set -euo pipefail

usage() { echo "usage: $0 head | worker HOST:PORT | stop" >&2; exit 2; }
export RAY_USAGE_STATS_ENABLED=0
# only who has the token may join: Ray runs whatever code it is sent
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

case "${1:-}" in
  head)
    [ $# -eq 1 ] || usage
    if [ "$RAY_AUTH_MODE" = token ]; then ray get-auth-token --generate > /dev/null; fi
    ray start --head --port="${RAY_PORT:-6379}" --include-dashboard=false
    ;;
  worker)
    [ $# -eq 2 ] || usage
    ray start --address="$2"
    ;;
  stop)
    [ $# -eq 1 ] || usage
    ray stop
    ;;
  *) usage ;;
esac
