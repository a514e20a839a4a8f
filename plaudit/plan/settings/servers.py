"""Servers of vLLM and SGLang for the engines of a plan: one command starts one replica."""

from __future__ import annotations

from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.settings.project import Lacks, Project, Sizes, command

QUANTIZED = {"fp8": "fp8"}


def _lacks(prediction: Prediction) -> Lacks:
    work = prediction.workload
    return {f"engines in {work.engine_dtype}": work.engine_dtype not in ("bf16", "fp8", "fp32"),
            f"a cache in {work.kv_dtype}": work.kv_dtype not in ("bf16", "fp8", work.engine_dtype)}  # fmt: skip


def _vllm(prediction: Prediction) -> str:
    sizes, cut, work = Sizes(prediction), prediction.plan.generation, prediction.workload
    return command('vllm serve "$MODEL"', {
        "--tensor-parallel-size": cut.tp,
        "--pipeline-parallel-size": cut.pp,
        "--data-parallel-size": cut.attention_groups,
        "--enable-expert-parallel": cut.ep > 1,
        "--dtype": "float32" if work.engine_dtype == "fp32" else "bfloat16",
        "--quantization": QUANTIZED.get(work.engine_dtype),
        "--kv-cache-dtype": "fp8" if work.kv_dtype == "fp8" else "auto",
        "--gpu-memory-utilization": sizes.engine_share,
        "--max-model-len": sizes.longest,
        "--max-num-seqs": sizes.sequences,
        "--enable-prefix-caching": work.group > 1,
        "--enable-sleep-mode": sizes.sleeps,
    })  # fmt: skip


def _sglang(prediction: Prediction) -> str:
    sizes, cut, work = Sizes(prediction), prediction.plan.generation, prediction.workload
    groups = cut.attention_groups
    return command('python -m sglang.launch_server --model-path "$MODEL"', {
        "--tp-size": cut.width,  # attention groups are parts of it
        "--pp-size": cut.pp,
        "--ep-size": cut.ep,
        "--dp-size": groups,
        "--enable-dp-attention": groups > 1,
        "--dtype": "float32" if work.engine_dtype == "fp32" else "bfloat16",
        "--quantization": QUANTIZED.get(work.engine_dtype),
        "--kv-cache-dtype": "fp8_e4m3" if work.kv_dtype == "fp8" else "auto",
        "--mem-fraction-static": sizes.engine_share,
        "--context-length": sizes.longest,
        "--max-running-requests": sizes.sequences * groups,
        "--enable-memory-saver": sizes.sleeps,
    })  # fmt: skip


VLLM = Project("vllm", "sh", _lacks, _vllm, "checked by the parser of vLLM 0.32.0 (tests/interop)")
SGLANG = Project("sglang", "sh", _lacks, _sglang,
                 "UNCHECKED by its parser; names as in SGLang's source of 2026-08-23 (cce0a12)")  # fmt: skip
