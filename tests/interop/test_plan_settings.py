"""Settings of the planner, read by the parsers of the target projects."""

import json
import shlex

import pytest
import yaml

from plaudit.plan.options import PlanOptions
from plaudit.plan.question import ask
from plaudit.plan.settings.choice import PROJECTS, settings_for
from tests.interop.environments import run_code

pytestmark = pytest.mark.interop

VLLM = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args({words!r})
validate_parsed_serve_args(args)
print(json.dumps({{"tp": args.tensor_parallel_size, "dp": args.data_parallel_size, "seqs": args.max_num_seqs,
                   "length": args.max_model_len, "ep": args.enable_expert_parallel}}))
"""
TRL = """
import json, tempfile
from trl import GRPOConfig
config = GRPOConfig(output_dir=tempfile.mkdtemp(), **json.loads({fields!r}))
print(json.dumps({{"mode": config.vllm_mode, "steps": config.steps_per_generation, "n": config.num_generations}}))
"""


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_vllm_reads_the_flags_of_a_server(model: str) -> None:
    question = ask(PlanOptions(model=model, hardware="2x8xH100", placement=["hybrid"]))
    text, chosen = settings_for(PROJECTS["vllm"], question)
    words = shlex.split(text.replace("$MODEL", model).replace("\\\n", " "), comments=True)
    assert words[:2] == ["vllm", "serve"]
    read = json.loads(run_code(".venv-vllm", VLLM.format(words=words[2:]), 300).splitlines()[-1])
    cut = chosen.plan.generation
    assert (read["tp"], read["dp"], read["ep"]) == (cut.tp, cut.attention_groups, cut.ep > 1)
    assert read["length"] == 3072


@pytest.mark.parametrize("placement", ["hybrid", "swapped"])
def test_trl_reads_the_fields_of_a_grpo_config(placement: str) -> None:
    question = ask(PlanOptions(model="llama-3.1-8b", hardware="1x8xH100", placement=[placement], batch=256, samples=8))
    text, chosen = settings_for(PROJECTS["trl"], question)
    fields = yaml.safe_load(text)
    # FSDP asks for a process group, which the launcher makes; and one process stands for all.
    fields.pop("fsdp", None)
    fields |= {"use_cpu": True, "generation_batch_size": fields["generation_batch_size"] // chosen.plan.cluster.devices}
    read = json.loads(run_code(".venv-interop", TRL.format(fields=json.dumps(fields)), 300).splitlines()[-1])
    assert read == {"mode": "colocate", "steps": fields["gradient_accumulation_steps"], "n": 8}
