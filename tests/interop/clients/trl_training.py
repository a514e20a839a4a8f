"""Two real steps of a TRL trainer on a CPU with rewards from the server.
In: url, trainer, policy, prompts, asynchronous. Out: the trainer's logged means and losses."""

import json
import logging
import sys
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from plaudit.integrations.trl import AsyncRemoteReward, RemoteReward

logging.disable(logging.WARNING)
arguments = json.load(sys.stdin)
make = AsyncRemoteReward if arguments["asynchronous"] else RemoteReward
reward = make(arguments["url"], model="sums")
Config, Trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[arguments["trainer"]]

with tempfile.TemporaryDirectory() as directory:
    config = Config(
        output_dir=directory, use_cpu=True, report_to=[], max_steps=2, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=32, logging_steps=1, save_strategy="no", seed=1, bf16=False,
        disable_tqdm=True, learning_rate=1e-4,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(arguments["policy"]),
        processing_class=AutoTokenizer.from_pretrained(arguments["policy"]),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": arguments["prompts"]}),
        args=config,
    )
    trainer.train()
reward.close()
name = reward.__name__
logs = [entry for entry in trainer.state.log_history if f"rewards/{name}/mean" in entry]
print()
print(
    json.dumps(
        {
            "steps": trainer.state.global_step,
            "means": [entry[f"rewards/{name}/mean"] for entry in logs],
            "losses": [entry["loss"] for entry in logs],
        }
    )
)
