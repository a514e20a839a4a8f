#!/usr/bin/env bash
# Solutions of SmolLM2 -> step values -> a process model -> three searches of equal width -> a report.
# `make smollm2-search` runs it; by hand: PLAUDIT=plaudit plaudit/recipes/smollm2-search.sh
set -euo pipefail
plaudit=${PLAUDIT:-plaudit}
recipes=$(dirname "$0")
run() {
  $plaudit "$@"
  echo "plaudit $1: done $SECONDS s after the start"
}

run train "$recipes/smollm2-solutions.toml" --rollout-only --fresh
run steps runs/smollm2-solutions runs/smollm2-steps.jsonl --split '\n' --completions 4
run train "$recipes/smollm2-prm.toml" --fresh
run search "$recipes/smollm2-search.toml" --method best-of-n --method rebase --method ets --out runs/smollm2 --fresh
run report runs/smollm2-ets runs/smollm2-rebase runs/smollm2-best-of-n
