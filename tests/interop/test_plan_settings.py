"""Settings written by the planner, parsed by the target projects' own parsers."""

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
def test_vllm_parses_the_flags_of_the_plan(model: str) -> None:
    question = ask(PlanOptions(model=model, hardware="2x8xH100", placement=["hybrid"]))
    text, chosen = settings_for(PROJECTS["vllm"], question)
    arguments = shlex.split(text.replace("$MODEL", model).replace("\\\n", " "), comments=True)
    assert arguments[:2] == ["vllm", "serve"]
    parsed = json.loads(run_code(".venv-vllm", VLLM.format(words=arguments[2:]), 300).splitlines()[-1])
    parallel = chosen.plan.generation
    assert (parsed["tp"], parsed["dp"], parsed["ep"]) == (parallel.tp, parallel.attention_groups, parallel.ep > 1)
    assert parsed["length"] == 3072


@pytest.mark.parametrize("placement", ["hybrid", "swapped"])
def test_trl_accepts_the_plan_as_a_grpo_config(placement: str) -> None:
    question = ask(PlanOptions(model="llama-3.1-8b", hardware="1x8xH100", placement=[placement], batch=256, samples=8))
    text, chosen = settings_for(PROJECTS["trl"], question)
    fields = yaml.safe_load(text)
    # FSDP needs a process group, which the launcher creates; here one process stands for all ranks.
    fields.pop("fsdp", None)
    fields |= {"use_cpu": True, "generation_batch_size": fields["generation_batch_size"] // chosen.plan.cluster.devices}
    parsed = json.loads(run_code(".venv-interop", TRL.format(fields=json.dumps(fields)), 300).splitlines()[-1])
    assert parsed == {"mode": "colocate", "steps": fields["gradient_accumulation_steps"], "n": 8}
