"""One real step of TRL's GRPO on conversations, with the reward model in the process and on the server, both of weight
1. In: url, policy, reward, prompts. Out: the rewards of every completion, by both."""

import json
import logging
import sys
import tempfile

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from plaudit.integrations.trl import RemoteReward

logging.disable(logging.WARNING)
arguments = json.load(sys.stdin)
remote = RemoteReward(arguments["url"], model="reward", failures="raise")
rewards = {}


class Trainer(GRPOTrainer):
    def _calculate_rewards(self, inputs, prompts, completions, *others):
        values = super()._calculate_rewards(inputs, prompts, completions, *others)
        rewards["in process"], rewards["remote"] = values.T.tolist()
        rewards["completions"] = [completion[0]["content"] for completion in completions]
        return values


with tempfile.TemporaryDirectory() as directory:
    config = GRPOConfig(
        output_dir=directory, use_cpu=True, report_to=[], max_steps=1, per_device_train_batch_size=8,
        num_generations=4, max_completion_length=8, logging_steps=1, save_strategy="no", seed=1, bf16=False,
        disable_tqdm=True, learning_rate=1e-4,
    )  # fmt: skip
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(arguments["policy"]),
        processing_class=AutoTokenizer.from_pretrained(arguments["policy"]),
        reward_funcs=[AutoModelForSequenceClassification.from_pretrained(arguments["reward"]), remote],
        reward_processing_classes=[AutoTokenizer.from_pretrained(arguments["reward"]), None],
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in arguments["prompts"]]}),
        args=config,
    )
    trainer.train()
remote.close()
print()
print(json.dumps(rewards))
