"""Loss and gradient of TRL's OnlineDPOTrainer, one training step on given responses instead of sampled ones.
In: directories of policy and reference, out, beta, samples (two per prompt, adjacent, with their rewards).
Out: the loss; the gradients in out/online-dpo.safetensors."""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

logging.disable(logging.WARNING)
arguments = json.load(sys.stdin)
samples = (
    arguments["samples"][::2] + arguments["samples"][1::2]
)  # TRL's order: all first responses, then all second ones


def padded(rows, left):
    longest = max(map(len, rows))
    mask = torch.tensor([[0] * (longest - len(row)) * left + [1] * len(row) + [0] * (longest - len(row)) * (not left)
                         for row in rows])  # fmt: skip
    ids = torch.zeros_like(mask)
    ids[mask.bool()] = torch.tensor([token for row in rows for token in row])
    return ids, mask


def generate(self, model, prompts, images=None):
    prompt = padded([sample["prompt_ids"] for sample in samples], left=True)
    return (*prompt, *padded([sample["token_ids"] for sample in samples], left=False), None)


def load(name):
    return AutoModelForCausalLM.from_pretrained(arguments[name], dtype=torch.float32)


OnlineDPOTrainer._generate = generate
with tempfile.TemporaryDirectory() as directory:
    count = len(samples) // 2
    args = OnlineDPOConfig(
        output_dir=directory, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, gradient_checkpointing=False,
        per_device_train_batch_size=count, beta=arguments["beta"], missing_eos_penalty=None,
    )  # fmt: skip
    trainer = OnlineDPOTrainer(
        model=load("policy"), ref_model=load("reference"), args=args,
        reward_funcs=lambda prompts, completions, **_: [sample["reward"] for sample in samples],
        train_dataset=Dataset.from_list([{"prompt": "1"}] * count),
        processing_class=AutoTokenizer.from_pretrained(arguments["policy"]),
    )  # fmt: skip
    loss = trainer.training_step(trainer.model, {"prompt": ["1"] * count})
    gradients = {n: p.grad.contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}
    save_file(gradients, Path(arguments["out"]) / "online-dpo.safetensors")
print()
print(json.dumps({"loss": loss.item()}))
