"""verl, OpenRLHF, slime, NeMo RL and TRL: their settings for the placement, layouts and batch of a plan.

Data, reward, learning rate and length of a run are no matter of a plan and stay the user's.
"""

from __future__ import annotations

from typing import Any

from plaudit.algo.methods import METHODS
from plaudit.plan.cost.plans import Plan
from plaudit.plan.cost.prediction import Prediction
from plaudit.plan.settings.project import Lacks, Project, Sizes, command
from plaudit.plan.shape.workload import Workload

DATASET, REWARD = "TRAIN_FILE", "REWARD"
VERL_ESTIMATORS = {"ppo": "gae", "grpo": "grpo", "rloo": "rloo"}
OPENRLHF_ESTIMATORS = {"ppo": "gae", "grpo": "group_norm", "rloo": "rloo"}
SLIME_ESTIMATORS = {"ppo": "ppo", "grpo": "grpo"}


def _common(prediction: Prediction, algorithms: object, more: Lacks) -> Lacks:
    work = prediction.workload
    return {
        f"algorithm {work.algorithm}": work.algorithm not in algorithms,  # type: ignore[operator]
        f"training in {work.dtype}": work.dtype != "bf16",
        f"rollouts in {work.engine_dtype}": work.engine_dtype != "bf16",
        f"a cache in {work.kv_dtype}": work.kv_dtype != "bf16",
        **more,
    }


def _idle(plan: Plan) -> bool:
    return plan.idle_devices > 0


def _tensor_fsdp(plan: Plan) -> bool:
    return plan.training.zero == 3 and plan.training.tp > 1


def _expert_fsdp(plan: Plan) -> bool:
    return plan.training.zero == 3 and plan.training.ep > 1


def _verl_lacks(prediction: Prediction) -> Lacks:
    plan = prediction.plan
    return _common(prediction, VERL_ESTIMATORS, {
        "disaggregated without overlap": plan.placement == "disaggregated",
        "async with a staleness other than 1": plan.placement == "async" and plan.staleness != 1,
        "engines on a part of the devices": _idle(plan),
        "FSDP with tensor parallelism": _tensor_fsdp(plan),
        "FSDP with expert parallelism": _expert_fsdp(plan),
        "LoRA with Megatron": plan.training.zero < 3 and prediction.workload.lora_rank > 0,
    })  # fmt: skip


def _verl(prediction: Prediction) -> str:
    sizes, plan, work = Sizes(prediction), prediction.plan, prediction.workload
    cut, engines, apart = plan.training, plan.generation, plan.placement == "async"
    megatron = cut.zero < 3
    swapped, actor = plan.placement == "swapped", "actor_rollout_ref.actor."
    rollout, model = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
    options: dict[str, object] = {
        "algorithm.adv_estimator": VERL_ESTIMATORS[work.algorithm],
        "data.train_files": f'"${DATASET}"',
        "data.train_batch_size": sizes.prompts,
        "data.max_prompt_length": sizes.longest_prompt,
        "data.max_response_length": sizes.longest_response,
        f"{model}path": '"$MODEL"',
        f"{model}lora_rank": work.lora_rank or None,
        f"{actor}ppo_mini_batch_size": max(1, sizes.prompts // sizes.minibatches),
        f"{actor}ppo_epochs": work.epochs,
        f"{actor}use_dynamic_bsz": True,
        f"{actor}ppo_max_token_len_per_gpu": sizes.micro_tokens,
        f"{actor}use_kl_loss": work.has_reference,
        f"{rollout}name": "vllm",
        f"{rollout}n": work.group,
        f"{rollout}tensor_model_parallel_size": engines.tp,
        f"{rollout}pipeline_model_parallel_size": engines.pp,
        f"{rollout}expert_parallel_size": engines.ep,
        f"{rollout}data_parallel_size": engines.attention_groups,
        f"{rollout}gpu_memory_utilization": sizes.engine_share,
        f"{rollout}max_num_seqs": sizes.sequences,
        f"{rollout}free_cache_engine": sizes.sleeps,
    }
    where = f"{actor}megatron." if megatron else f"{actor}fsdp_config."
    options |= {f"{where}param_offload": swapped, f"{where}optimizer_offload": swapped or cut.offload_optimizer}
    reference = "actor_rollout_ref.ref." + ("megatron." if megatron else "fsdp_config.")
    options[f"{reference}param_offload"] = swapped or cut.park
    if megatron:
        options |= {
            f"{where}tensor_model_parallel_size": cut.tp, f"{where}pipeline_model_parallel_size": cut.pp,
            f"{where}expert_model_parallel_size": cut.ep, f"{where}context_parallel_size": cut.cp,
        }  # fmt: skip
        if cut.recompute == "full":
            again = f"{where}override_transformer_config."
            options |= {f"{again}recompute_granularity": "full", f"{again}recompute_method": "uniform",
                        f"{again}recompute_num_layers": 1}  # fmt: skip
    else:
        options |= {f"{model}enable_gradient_checkpointing": cut.recompute == "full",
                    f"{actor}ulysses_sequence_parallel_size": cut.cp}  # fmt: skip
    if work.value_model is not None:
        options["critic.model.path"] = '"$CRITIC"'
    options |= {"trainer.nnodes": plan.cluster.nodes, "trainer.n_gpus_per_node": plan.cluster.devices_per_node}
    if apart:
        options |= {"rollout.nnodes": plan.generation_cluster.nodes,
                    "rollout.n_gpus_per_node": plan.generation_cluster.devices_per_node}  # fmt: skip
    kind = "megatron_" if megatron else ""
    program = f"python3 -m verl.trainer.main_ppo --config-name=ppo_{kind}trainer"
    if apart:
        main = "python3 -m verl.experimental.one_step_off_policy.main_ppo --config-path=config"
        program = f"{main} --config-name=one_step_off_ppo_{kind}trainer"
    return command(program, options, "=")


def _openrlhf_lacks(prediction: Prediction) -> Lacks:
    plan = prediction.plan
    cut, engines = plan.training, plan.generation
    return _common(prediction, OPENRLHF_ESTIMATORS, {
        "disaggregated without overlap": plan.placement == "disaggregated",
        "everything in memory at once (colocated)": plan.placement == "colocated",
        "pipeline or expert parallelism": cut.pp > 1 or cut.ep > 1 or engines.pp > 1 or engines.ep > 1,
        "engines on a part of the devices": _idle(plan),
        "tensor parallelism with ZeRO 3": _tensor_fsdp(plan),
    })  # fmt: skip


def _openrlhf(prediction: Prediction) -> str:
    sizes, plan, work, cut = Sizes(prediction), prediction.plan, prediction.workload, prediction.plan.training
    nodes, devices, critic = plan.cluster.nodes, plan.cluster.devices_per_node, work.value_model is not None
    apart = plan.placement == "async"
    return command("python3 -m openrlhf.cli.train_ppo_ray", {
        "--actor.model_name_or_path": '"$MODEL"', "--data.prompt_dataset": f'"${DATASET}"',
        "--reward.remote_url": None if work.reward else f'"${REWARD}"',
        "--reward.model_name_or_path": '"$REWARD_MODEL"' if work.reward else None,
        "--critic.model_name_or_path": '"$CRITIC"' if critic else None,
        "--actor.num_nodes": nodes, "--actor.num_gpus_per_node": devices,
        "--ref.num_nodes": nodes, "--ref.num_gpus_per_node": devices,
        "--critic.num_nodes": nodes if critic else None, "--critic.num_gpus_per_node": devices if critic else None,
        "--reward.num_nodes": nodes if work.reward else None,
        "--reward.num_gpus_per_node": devices if work.reward else None,
        "--train.colocate_all": True, "--train.async_enable": apart,
        "--train.async_queue_size": plan.staleness if apart else None,
        "--vllm.num_engines": plan.replicas, "--vllm.tensor_parallel_size": plan.generation.tp,
        "--vllm.gpu_memory_utilization": sizes.engine_share, "--vllm.enable_sleep": not apart,
        "--vllm.sync_backend": "nccl", "--vllm.enable_prefix_caching": work.group > 1,
        "--ds.enable_sleep": plan.placement == "swapped", "--ds.zero_stage": cut.zero, "--ds.param_dtype": "bf16",
        "--ds.tensor_parallel_size": cut.tp, "--ds.ring_attn_size": cut.cp, "--ds.packing_samples": True,
        "--ds.adam_offload": cut.offload_optimizer, "--ds.lora.rank": work.lora_rank or None,
        "--ref.offload": cut.park, "--actor.gradient_checkpointing_enable": cut.recompute == "full",
        "--train.dynamic_batch_enable": True, "--train.max_tokens_per_gpu": sizes.micro_tokens,
        "--rollout.max_tokens_per_gpu": sizes.micro_tokens, "--rollout.batch_size": sizes.prompts,
        "--rollout.n_samples_per_prompt": work.group, "--rollout.max_new_tokens": sizes.longest_response,
        "--train.batch_size": max(1, sizes.prompts * work.group // sizes.minibatches),
        "--train.max_epochs": work.epochs, "--data.max_len": sizes.longest,
        "--algo.advantage.estimator": OPENRLHF_ESTIMATORS[work.algorithm],
        "--algo.kl.init_coef": None if work.has_reference else 0, "--algo.kl.use_loss": work.has_reference,
    })  # fmt: skip


def _slime_lacks(prediction: Prediction) -> Lacks:
    plan = prediction.plan
    return _common(prediction, SLIME_ESTIMATORS, {
        "FSDP": plan.training.zero == 3, "LoRA": prediction.workload.lora_rank > 0,
        "everything in memory at once (colocated)": plan.placement == "colocated",
        "engines with stages or experts apart": plan.generation.pp > 1 or plan.generation.ep > 1,
        "engines on a part of the devices": _idle(plan),
    })  # fmt: skip


def _slime(prediction: Prediction) -> str:
    sizes, plan, work, cut = Sizes(prediction), prediction.plan, prediction.workload, prediction.plan.training
    again = cut.recompute == "full"
    program = "python3 train_async.py" if plan.placement == "async" else "python3 train.py"
    return command(program, {
        "--hf-checkpoint": '"$MODEL"', "--prompt-data": f'"${DATASET}"',
        "--actor-num-nodes": plan.cluster.nodes, "--actor-num-gpus-per-node": plan.cluster.devices_per_node,
        "--num-gpus-per-node": plan.cluster.devices_per_node,
        "--colocate": plan.shared, "--rollout-num-gpus": None if plan.shared else plan.generation_cluster.devices,
        "--rollout-num-gpus-per-engine": plan.generation.tp,
        "--sglang-mem-fraction-static": sizes.engine_share,
        "--tensor-model-parallel-size": cut.tp, "--sequence-parallel": cut.tp > 1,
        "--pipeline-model-parallel-size": cut.pp, "--context-parallel-size": cut.cp,
        "--expert-model-parallel-size": cut.ep, "--expert-tensor-parallel-size": 1,
        "--recompute-granularity": "full" if again else None, "--recompute-method": "uniform" if again else None,
        "--recompute-num-layers": 1 if again else None,
        "--use-dynamic-batch-size": True, "--max-tokens-per-gpu": sizes.micro_tokens,
        "--rollout-batch-size": sizes.prompts, "--n-samples-per-prompt": work.group,
        "--rollout-max-prompt-len": sizes.longest_prompt, "--rollout-max-response-len": sizes.longest_response,
        "--global-batch-size": max(1, sizes.prompts * work.group // sizes.minibatches),
        "--advantage-estimator": SLIME_ESTIMATORS[work.algorithm], "--use-kl-loss": work.has_reference,
    })  # fmt: skip


def _nemo_lacks(prediction: Prediction) -> Lacks:
    plan, work = prediction.plan, prediction.workload
    nodes = not plan.shared and plan.cluster.nodes > 1 and plan.cluster.devices_per_node != (
        plan.generation_cluster.devices_per_node
    )  # fmt: skip
    return _common(prediction, ("grpo",), {
        "everything in memory at once (colocated)": plan.placement == "colocated",
        "several passes over a batch": work.epochs > 1,
        "FSDP with expert parallelism": _expert_fsdp(plan),
        "LoRA with Megatron": plan.training.zero < 3 and work.lora_rank > 0,
        "engines on a part of the devices": _idle(plan),
        "pools of different nodes": nodes,
    })  # fmt: skip


def _nemo(prediction: Prediction) -> str:
    sizes, plan, work, cut = Sizes(prediction), prediction.plan, prediction.workload, prediction.plan.training
    megatron, engines = cut.zero < 3, plan.generation
    one_node = not plan.shared and plan.devices <= plan.cluster.accelerator.node
    policy: dict[str, Any] = {
        "model_name": "MODEL", "precision": "bfloat16", "max_total_sequence_length": sizes.longest,
        "train_global_batch_size": max(1, sizes.prompts * work.group // sizes.minibatches),
        "train_micro_batch_size": 1, "logprob_batch_size": 1,
        "sequence_packing": {"enabled": True, "train_mb_tokens": sizes.micro_tokens * cut.cp,
                             "logprob_mb_tokens": sizes.micro_tokens * cut.cp},
        "dtensor_cfg": {"enabled": not megatron}, "megatron_cfg": {"enabled": megatron},
        "generation": {
            "backend": "vllm", "max_new_tokens": sizes.longest_response,
            "vllm_cfg": {"tensor_parallel_size": engines.tp, "pipeline_parallel_size": engines.pp,
                         "expert_parallel_size": engines.ep, "gpu_memory_utilization": sizes.engine_share,
                         "max_model_len": sizes.longest, "async_engine": plan.placement == "async"},
            "colocated": {"enabled": plan.shared},
        },
    }  # fmt: skip
    if megatron:
        policy["megatron_cfg"] |= {
            "tensor_model_parallel_size": cut.tp, "pipeline_model_parallel_size": cut.pp,
            "expert_model_parallel_size": cut.ep, "context_parallel_size": cut.cp, "sequence_parallel": cut.tp > 1,
            "activation_checkpointing": cut.recompute == "full",
        }  # fmt: skip
        if cut.offload_optimizer:
            policy["megatron_cfg"]["optimizer"] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    else:
        policy["dtensor_cfg"] |= {
            "tensor_parallel_size": cut.tp, "context_parallel_size": cut.cp, "cpu_offload": cut.offload_optimizer,
            "activation_checkpointing": cut.recompute == "full",
        }  # fmt: skip
        if work.lora_rank:
            policy["dtensor_cfg"]["lora_cfg"] = {"enabled": True, "dim": work.lora_rank}
    if not plan.shared:
        where = {"gpus_per_node": plan.generation_cluster.devices} if one_node else {
            "num_nodes": plan.generation_cluster.nodes, "gpus_per_node": plan.generation_cluster.devices_per_node
        }  # fmt: skip
        policy["generation"]["colocated"]["resources"] = where
    grpo: dict[str, Any] = {"num_prompts_per_step": sizes.prompts, "num_generations_per_prompt": work.group}
    loss: dict[str, Any] = {} if work.has_reference else {"reference_policy_kl_penalty": 0.0}
    if plan.placement == "async":
        grpo["async_grpo"] = {"enabled": True, "max_trajectory_age_steps": plan.staleness}
        loss["use_importance_sampling_correction"] = True
    cluster = {"num_nodes": 1, "gpus_per_node": plan.devices} if one_node else {
        "num_nodes": plan.cluster.nodes + (0 if plan.shared else plan.generation_cluster.nodes),
        "gpus_per_node": plan.cluster.devices_per_node,
    }  # fmt: skip
    tree = {"defaults": "grpo_math_1B.yaml", "grpo": grpo, "loss_fn": loss, "policy": policy, "cluster": cluster}
    return yaml({key: value for key, value in tree.items() if value})


def _trl_lacks(prediction: Prediction) -> Lacks:
    plan, work, cut = prediction.plan, prediction.workload, prediction.plan.training
    per_device = work.batch % (plan.cluster.devices * Sizes(prediction).minibatches)
    return _common(prediction, ("grpo",), {
        "async": plan.placement == "async",
        "tensor, pipeline, expert or context parallelism in training": max(cut.tp, cut.pp, cut.ep, cut.cp) > 1,
        "engines with stages or experts apart": plan.generation.pp > 1 or plan.generation.ep > 1,
        "several servers": plan.placement == "disaggregated" and plan.replicas > 1,
        "engines on a part of the devices": _idle(plan),
        "the optimizer on the host": cut.offload_optimizer,
        f"{work.batch} responses over {plan.cluster.devices} devices": bool(per_device),
    })  # fmt: skip


def _kl(work: Workload) -> float:
    """Of our preset: TRL's own is none."""
    return float(METHODS[work.algorithm].preset.get("kl", {}).get("coef", 0.0)) if work.has_reference else 0.0


def _trl(prediction: Prediction) -> str:
    """The fields of a GRPOConfig; FSDP's are those of `accelerate launch`."""
    sizes, plan, work, cut = Sizes(prediction), prediction.plan, prediction.workload, prediction.plan.training
    each = work.batch // plan.cluster.devices // sizes.minibatches
    """Responses of an update on a device."""
    at_once = max(n for n in range(1, each + 1) if each % n == 0 and (n == 1 or n * sizes.longest <= cut.micro_tokens))
    return yaml({
        "bf16": True, "gradient_checkpointing": cut.recompute == "full",
        "per_device_train_batch_size": at_once, "gradient_accumulation_steps": each // at_once,
        "generation_batch_size": work.batch, "num_generations": work.group, "num_iterations": work.epochs,
        "max_completion_length": sizes.longest_response, "beta": _kl(work),
        "use_vllm": True, "vllm_mode": "colocate" if plan.shared else "server",
        "vllm_tensor_parallel_size": plan.generation.tp, "vllm_gpu_memory_utilization": sizes.engine_share,
        "vllm_max_model_length": sizes.longest, "vllm_enable_sleep_mode": sizes.sleeps,
        **({"fsdp": "full_shard auto_wrap"} if cut.zero == 3 else {}),
    })  # fmt: skip


def yaml(tree: dict[str, Any], depth: int = 0) -> str:
    lines = ""
    for key, value in tree.items():
        nested = isinstance(value, dict)
        shown = (
            f"\n{yaml(value, depth + 1)}"
            if nested
            else f" {str(value).lower() if isinstance(value, bool) else value}\n"
        )
        lines += f"{'  ' * depth}{key}:{shown}"
    return lines


def _source(name: str, date: str) -> str:
    return f"UNCHECKED by its parser; names as in {name}'s source of {date}"


VERL = Project("verl", "sh", _verl_lacks, _verl, _source("verl", "2026-01-29 (b178a3c)"))
OPENRLHF = Project("openrlhf", "sh", _openrlhf_lacks, _openrlhf, _source("OpenRLHF", "2026-08-13 (3c3be62)"))
SLIME = Project("slime", "sh", _slime_lacks, _slime, _source("slime", "2026-08-21 (624b824)"))
NEMO = Project("nemo-rl", "yaml", _nemo_lacks, _nemo, _source("NeMo RL", "2026-08-22 (7ea279a)"))
TRL = Project("trl", "yaml", _trl_lacks, _trl, "checked by GRPOConfig of TRL 1.16.0 (tests/interop)")
