"""TRL's GRPOTrainer on the sums world, for benchmarks/rl_vs_trl.py. Runs in TRL's environment and reads its work as
JSON.

Configured for the highest speed we know on a CPU: transformers' generation of all samples at once, one forward pass, no
activation checkpointing, no dropout, no logging except of what is measured."""

import json
import logging
import re
import resource
import sys
import tempfile
import time

import torch
from datasets import Dataset
from even_words import share
from sums_accuracy import SumsAccuracy
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

logging.disable(logging.WARNING)
given = json.load(sys.stdin)
torch.set_num_threads(given["threads"])
ANSWER = re.compile(r"#(\d+)$")


def even(prompts, completions, answer, **_):
    return [share(*each) for each in zip(prompts, completions, answer, strict=True)]


def exact(completions, answer, **_):
    found = [ANSWER.search(text) for text in completions]
    return [float(match is not None and match[1] == truth) for match, truth in zip(found, answer, strict=True)]


class Timed(GRPOTrainer):
    """Records the phases of a step's time."""

    spent: dict

    def _generate(self, prompts):
        return self._timed("generate", super()._generate, prompts)

    def _calculate_rewards(self, *arguments):
        return self._timed("reward", super()._calculate_rewards, *arguments)

    def _timed(self, name, call, *arguments):
        begin = time.perf_counter()
        found = call(*arguments)
        self.spent[name] = time.perf_counter() - begin
        return found


class Watch(TrainerCallback):
    """Evaluation stops the clock."""

    def __init__(self, judge):
        self.judge, self.steps, self.accuracy, self.seconds, self.begin, self.cpu = judge, [], [], 0.0, 0.0, 0.0

    def on_train_begin(self, args, state, control, model, **_):
        self._evaluate(0, model)
        self.begin, self.cpu = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, model, **_):
        seconds = time.perf_counter() - self.begin
        self.seconds += seconds
        self.steps.append({"step": seconds, "cpu": time.process_time() - self.cpu, **trainer.spent})
        self._evaluate(state.global_step, model)
        if self.accuracy and self.accuracy[-1][2] >= given["target"]:
            control.should_training_stop = True
        self.begin, self.cpu = time.perf_counter(), time.process_time()

    def _evaluate(self, step, model):
        if self.judge is not None and step % given["eval_every"] == 0:
            self.accuracy.append([step, self.seconds, self.judge.of(model)])


tokenizer = AutoTokenizer.from_pretrained(given["policy"])
with tempfile.TemporaryDirectory() as directory:
    config = GRPOConfig(
        output_dir=directory, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, save_strategy="no",
        gradient_checkpointing=False, dataloader_num_workers=0, logging_steps=1000, seed=given["seed"],
        max_steps=given["steps"], per_device_train_batch_size=given["prompts"] * given["samples"],
        num_generations=given["samples"], gradient_accumulation_steps=1, num_iterations=1, shuffle_dataset=False,
        max_completion_length=given["max_tokens"], temperature=1.0, loss_type="grpo", beta=0.0, scale_rewards="group",
        learning_rate=given["lr"], lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9,
        adam_beta2=0.95, max_grad_norm=1.0,
    )  # fmt: skip
    watch = Watch(SumsAccuracy(given["policy"], given["eval_items"]) if given["eval_every"] else None)
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(given["policy"]),
        processing_class=tokenizer,
        reward_funcs=exact if given["reward"]["rule"] == "exact" else even,
        train_dataset=Dataset.from_dict({"prompt": given["texts"], "answer": given["answers"]}),
        args=config,
        callbacks=[watch],
    )
    trainer.spent = {}
    trainer.train()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print()
print(json.dumps({"steps": watch.steps, "accuracy": watch.accuracy, "peak_rss": peak}))
