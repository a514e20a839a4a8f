"""TRL's DPOTrainer and DistillationTrainer for benchmarks/methods_vs_trl.py. Runs in TRL's environment and reads its
work as JSON.

Configured for the highest speed we know on a CPU: the reference's log-probs before training, the whole batch in one
pass, no activation checkpointing, no logging except of what is measured."""

import json
import logging
import sys
import tempfile
import time

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer
from trl.trainer.distillation_config import DistillationConfig
from trl.trainer.distillation_trainer import DistillationTrainer

logging.disable(logging.WARNING)
given = json.load(sys.stdin)
torch.set_num_threads(given["threads"])


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


class Watch(TrainerCallback):
    def __init__(self):
        self.steps, self.begin = [], None

    def on_step_begin(self, args, state, control, **_):
        # The batch was made before this is called, so timing starts at the end of the previous step.
        self.begin = self.begin or (time.perf_counter(), time.process_time())

    def on_step_end(self, args, state, control, **_):
        now = (time.perf_counter(), time.process_time())
        self.steps.append({"wall": now[0] - self.begin[0], "cpu": now[1] - self.begin[1]})
        self.begin = now


class KeptLosses:
    """Records the loss of every step, in order, and keeps the rows in the order of the file."""

    losses: list

    def compute_loss(self, *arguments, **named):
        loss = super().compute_loss(*arguments, **named)
        self.losses.append(loss.item())
        return loss


class Dpo(KeptLosses, DPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset if dataset is None else dataset)


class Distillation(KeptLosses, DistillationTrainer):
    def _generate_single_turn(self, prompt_ids, *arguments, **named):
        if not given["samples"]:
            return super()._generate_single_turn(prompt_ids, *arguments, **named)
        batch = given["samples"][len(self.losses)]
        assert [list(ids) for ids in prompt_ids] == [ids for ids, _ in batch], "other prompts than were sampled for"
        return [response for _, response in batch]


with tempfile.TemporaryDirectory() as directory:
    common = {
        "output_dir": directory, "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", "gradient_checkpointing": False, "dataloader_num_workers": 0, "logging_steps": 10**6,
        "seed": 1, "max_steps": given["steps"], "per_device_train_batch_size": given["batch"],
        "gradient_accumulation_steps": 1, "learning_rate": given["lr"], "lr_scheduler_type": "constant",
        "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0,
    }  # fmt: skip
    watch = Watch()
    tokenizer = AutoTokenizer.from_pretrained(given["policy"])
    if given["method"] == "dpo":
        trainer = Dpo(
            model=load(given["policy"]), processing_class=tokenizer, train_dataset=Dataset.from_list(given["rows"]),
            args=DPOConfig(beta=0.1, precompute_ref_log_probs=True, max_length=None, **common), callbacks=[watch],
        )  # fmt: skip
    else:
        rows = given["rows"]
        if given["samples"]:
            prompts = [ids for batch in given["samples"] for ids, _ in batch]
            rows = [{"prompt": tokenizer.decode(ids, skip_special_tokens=True)} for ids in prompts]
        trainer = Distillation(
            model=load(given["policy"]), teacher_model=load(given["teacher"]), processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows), callbacks=[watch],
            args=DistillationConfig(
                beta=1.0, temperature=1.0, max_completion_length=given["max_tokens"], shuffle_dataset=False, **common
            ),
        )  # fmt: skip
    trainer.losses = []
    trainer.train()
print()
print(json.dumps({"losses": trainer.losses, "steps": watch.steps}))
