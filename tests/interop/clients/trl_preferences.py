"""Loss and gradient of TRL's own preference trainers on one batch of all rows.
In: directories of models, out, pairs, labelled, cases. Out: the loss of each case; its gradients in
out/<case>.safetensors.

The trainers read, tokenise, pad and collate the rows as in training."""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

logging.disable(logging.WARNING)
arguments = json.load(sys.stdin)
TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig), "kto": (KTOTrainer, KTOConfig), "orpo": (ORPOTrainer, ORPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
}  # fmt: skip


def load(name):
    return AutoModelForCausalLM.from_pretrained(arguments["models"][name], dtype=torch.float32)


def run(case, directory):
    rows = arguments[case["rows"]]
    trainer_class, config_class = TRAINERS[case["trainer"]]
    args = config_class(
        output_dir=directory, use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, gradient_checkpointing=False,
        per_device_train_batch_size=len(rows), **case["config"],
    )  # fmt: skip
    more = {"ref_model": load(case["reference"])} if case["trainer"] in ("dpo", "kto") else {}
    trainer = trainer_class(
        model=load(case["policy"]), args=args, train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(arguments["models"]["policy"]), **more,
    )  # fmt: skip
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {n: p.grad.contiguous() for n, p in trainer.model.named_parameters() if p.grad is not None}
    save_file(gradients, Path(arguments["out"]) / f"{case['name']}.safetensors")
    drift = trainer._metrics["train"]["kl"] if case["trainer"] == "kto" else []
    return {"loss": loss.item(), "kl": drift}


with tempfile.TemporaryDirectory() as directory:
    results = {case["name"]: run(case, directory) for case in arguments["cases"]}
print()
print(json.dumps(results))
