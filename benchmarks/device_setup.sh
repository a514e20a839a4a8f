#!/usr/bin/env bash
# Installs what the GPU tests and benchmarks need from a folder of wheels, on a machine that has torch, transformers and
# httpx and no network. The folder, on a machine that has a network, for that machine's Python:
#   pip download --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
#     --python-version 3.12 -c constraints.txt -d build/wheels $(sed -n 's/^  \(.*\) # wheels$/\1/p' benchmarks/device_setup.sh)
set -eu
wheels=(
  pydantic pydantic_core annotated_types typing_extensions typing_inspection msgspec # wheels
  httptools uvloop prometheus_client gguf peft accelerate psutil # wheels
  pytest pytest_timeout iniconfig pluggy packaging pygments hypothesis sortedcontainers # wheels
  jsonschema jsonschema_specifications referencing rpds_py attrs uvicorn h11 click # wheels
)
python3 -m pip install --quiet --no-index --no-deps --find-links "${1:-build/wheels}" "${wheels[@]}"
