#!/usr/bin/env bash
# Installs what the GPU tests and benchmarks need from a folder of wheels, on a machine that has torch and no network.
set -eu
python3 -m pip install --quiet --no-index --no-deps --find-links "${1:-build/wheels}" \
  pydantic pydantic_core annotated_types typing_extensions typing_inspection gguf \
  fastapi starlette annotated_doc anyio sniffio msgspec prometheus_client uvicorn httptools uvloop h11 click peft accelerate psutil \
  pytest pytest_timeout iniconfig pluggy packaging pygments hypothesis sortedcontainers \
  jsonschema jsonschema_specifications referencing rpds_py attrs
