"""Loss, gradient and advantages of TRL's own trainers on given samples.
In: policy and reference directories, out, samples, cases. Out: loss and advantages of each case; its gradients in
out/<case>.safetensors.

The trainers build their batch as in training (padding, masks, old and reference log-probs, advantages): only the
sampling is replaced."""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

logging.disable(logging.WARNING)
arguments = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(arguments["policy"])


def rollout(prompts, trainer):
    samples = trainer.given_samples
    return {
        "prompt_ids": [s["prompt_ids"] for s in samples],
        "completion_ids": [s["token_ids"] for s in samples],
        "logprobs": [s["old"] for s in samples],
        "env_mask": [s["mask"] for s in samples],
    }


class Rloo(RLOOTrainer):
    """RLOO has no hook for rollouts."""

    def _generate(self, prompts):
        samples = self.given_samples
        texts = tokenizer.batch_decode([s["token_ids"] for s in samples])
        return [s["prompt_ids"] for s in samples], [s["token_ids"] for s in samples], texts


def padded(rows, width):
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows])


def run(case, directory):
    samples = arguments["samples"][case["samples"]]

    def rewards(completions, **columns):
        return [s["reward"] for s in samples]

    shared = {
        "output_dir": directory, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "gradient_checkpointing": False, "per_device_train_batch_size": len(samples),
        "num_generations": arguments["group"], **case["config"],
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(arguments["policy"])
    model.config._name_or_path = arguments["reference"]  # the trainer loads its reference model from here
    common = {
        "model": model,
        "reward_funcs": rewards,
        "train_dataset": Dataset.from_dict({"prompt": ["a"] * len(samples)}),
        "processing_class": tokenizer,
    }
    if case["trainer"] == "rloo":
        trainer = Rloo(args=RLOOConfig(**shared), **common)
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**shared), rollout_func=rollout, **common)
    trainer.given_samples = samples
    trainer.current_gradient_accumulation_steps = 1  # normally set by the training loop
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": "a"} for _ in samples])
    advantages = batch["advantages"].tolist()
    width = batch["completion_ids"].shape[1]
    if case["trainer"] == "grpo":
        batch["old_per_token_logps"] = padded([s["old"] for s in samples], width)
    if "token_advantages" in case:
        batch["advantages"] = padded(case["token_advantages"], width)
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {n: p.grad.contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}
    save_file(gradients, Path(arguments["out"]) / f"{case['name']}.safetensors")
    return {"loss": loss.item(), "advantages": advantages, "padding": int((batch["completion_mask"] == 0).sum())}


with tempfile.TemporaryDirectory() as directory:
    results = {case["name"]: run(case, directory) for case in arguments["cases"]}
print()
print(json.dumps(results))
