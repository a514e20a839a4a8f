"""TRL's GRPOTrainer on the task of smollm2-grpo, for benchmarks/smollm2_vs_trl.py. Reads its work as JSON.

transformers' generation of all samples at once, the requested number of gradient accumulation steps, bf16 arithmetic on
float32 weights (TRL's default), no activation checkpointing, no logging except of what is measured."""

import json
import logging
import re
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

logging.disable(logging.WARNING)
given = json.load(sys.stdin)
ANSWER = re.compile(given["answer"])
rewards = []


def right(completions, answer, **_):
    found = [ANSWER.search(messages[-1]["content"]) for messages in completions]
    scores = [float(match is not None and match[1] == truth) for match, truth in zip(found, answer, strict=True)]
    rewards.append(sum(scores) / len(scores))
    return scores


class Watch(TrainerCallback):
    """Records seconds and reward of each step; stops at the target or the time limit."""

    def __init__(self):
        self.steps = []

    def on_train_begin(self, args, state, control, **_):
        self.begin = self.last = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        torch.cuda.synchronize()
        now = time.perf_counter()
        self.steps.append({"seconds": now - self.last, "at": now - self.begin, "reward": rewards[-1]})
        self.last = now
        last = [step["reward"] for step in self.steps[-given["window"] :]]
        reached = len(last) == given["window"] and sum(last) / len(last) >= given["target"]
        if reached or now - self.begin > given["limit"]:
            control.should_training_stop = True


watch = Watch()
with tempfile.TemporaryDirectory() as directory:
    config = GRPOConfig(
        output_dir=directory, bf16=True, report_to=[], disable_tqdm=True, save_strategy="no",
        gradient_checkpointing=False, dataloader_num_workers=0, logging_steps=10**6, seed=given["seed"],
        max_steps=given["steps"], per_device_train_batch_size=given["prompts"] * given["samples"] // given["parts"],
        num_generations=given["samples"], gradient_accumulation_steps=given["parts"], num_iterations=1,
        max_completion_length=given["max_tokens"], temperature=given["temperature"], top_k=0, loss_type="grpo",
        beta=0.0, shuffle_dataset=False, scale_rewards="group",
        learning_rate=given["lr"], lr_scheduler_type="constant_with_warmup", warmup_steps=given["warmup"],
        weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(given["policy"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(given["policy"]),
        reward_funcs=right,
        train_dataset=Dataset.from_dict({"prompt": given["messages"], "answer": given["answers"]}),
        args=config,
        callbacks=[watch],
    )
    trainer.train()
print()
print(json.dumps({"steps": watch.steps, "peak_bytes": torch.cuda.max_memory_allocated()}))
