#!/usr/bin/env bash
# Answers of SmolLM2 -> pairs -> a reward model -> a server -> PPO against it -> a report.
# `make smollm2-ppo-rm` runs it; by hand: PLAUDIT=plaudit plaudit/recipes/smollm2-ppo-rm.sh
set -euo pipefail
plaudit=${PLAUDIT:-plaudit}
recipes=$(dirname "$0")
run() {
  $plaudit "$@"
  echo "plaudit $1: done $SECONDS s after the start"
}

run train "$recipes/smollm2-rollouts.toml" --rollout-only --fresh
run pairs runs/smollm2-rollouts runs/smollm2-pairs.jsonl
run train "$recipes/smollm2-reward.toml" --fresh

port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
echo "the reward model is served on http://127.0.0.1:$port (log: runs/smollm2-serve.log)"
$plaudit serve --config "$recipes/smollm2-serve.toml" --port "$port" > runs/smollm2-serve.log 2>&1 &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true' EXIT
run train "$recipes/smollm2-ppo-rm.toml" --fresh --set reward.url="http://127.0.0.1:$port"
run report runs/smollm2-ppo-rm runs/smollm2-reward
