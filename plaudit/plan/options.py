"""The options of `plaudit plan`: names, types, defaults and help, declared once for the command line and for `ask`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from typer import Option


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: Annotated[str | None, Option(help="A built-in name such as llama-3.1-70b, or a config.json.")] = None
    hardware: Annotated[
        str | None, Option(help="Nodes x devices x accelerator: 8x8xH100, 64xH100, H100. Default: 1x8xH100.")
    ] = None
    algorithm: Annotated[str, Option(help="ppo, grpo, dapo, ...: determines which models a step needs.")] = "grpo"
    prompt: Annotated[float | None, Option(help="Mean tokens of a prompt. Default: 512.")] = None
    response: Annotated[float | None, Option(help="Mean tokens of a response. Default: 1024.")] = None
    max_response: Annotated[float, Option(help="Longest response. Default: twice the mean.")] = 0
    batch: Annotated[int, Option(help="Responses in a step.")] = 1024
    samples: Annotated[int, Option(help="Responses to each prompt. Default: 8 for GRPO and its like, else 1.")] = 0
    updates: Annotated[int, Option(help="Optimizer steps in a step: epochs times minibatches.")] = 1
    epochs: Annotated[int, Option(help="Passes over a step's responses.")] = 1
    steps: Annotated[int, Option(help="Steps of the run, for its cost.")] = 1000
    reward: Annotated[str | None, Option(metavar="MODEL", help="A reward model. Default: a rule.")] = None
    critic: Annotated[str | None, Option(metavar="MODEL", help="PPO's critic. Default: as the policy.")] = None
    lora: Annotated[int, Option(metavar="RANK", help="Train adapters of this rank. Default: all weights.")] = 0
    dtype: Annotated[str, Option(help="Of training: bf16, fp8, fp32.")] = "bf16"
    generation_dtype: Annotated[str, Option(help="Of the engine: bf16, fp8, fp4. Default: as trained.")] = ""
    kv_dtype: Annotated[str, Option(help="Of the cache: bf16, fp8.")] = "bf16"
    placement: Annotated[list[str], Option(help="Only this placement; repeatable.")] = field(default_factory=list)
    channel: Annotated[str | None, Option(help="How weights travel: broadcast, reshard, disk, ...")] = None
    staleness: Annotated[int, Option(help="async: updates that a response may be behind.")] = 1
    generation_hardware: Annotated[str | None, Option(help="Separate hardware for generation: 2x8xH200.")] = None
    compare: Annotated[
        str | None,
        Option(metavar="A,B,C", help="Rank these accelerators, or rent one of them."),
    ] = None
    price: Annotated[str, Option(help="low, mid, high (on demand), 3yr, owned, or $ per device and hour.")] = "mid"
    budget: Annotated[str | None, Option(metavar="$/h", help="What to rent within this budget: 60/h.")] = None
    deadline: Annotated[str | None, Option(help="What to rent to finish --steps in time: 90m, 24h, 7d.")] = None
    goal: Annotated[
        str | None,
        Option(help="What renting minimises: cost, time, energy. Default: time; cost with --deadline."),
    ] = None
    serve: Annotated[str | None, Option(metavar="MODEL", help="Plan a reward service; with --rate and --p99.")] = None
    rate: Annotated[float | None, Option(help="--serve: items per second.")] = None
    p99: Annotated[float | None, Option(help="--serve: seconds in which 99 % are answered.")] = None
    sweep: Annotated[
        str | None,
        Option(metavar="nodes", help="Step and price on 1, 2, ... nodes of each accelerator of --compare."),
    ] = None
    utilisation: Annotated[
        str | None, Option(metavar="0.2..1.0", help="Price of a token under partial load, in training and serving.")
    ] = None
    pools: Annotated[
        float | None,
        Option(metavar="SECONDS", help="Separate pools for prefill, decode and training that reach this step time."),
    ] = None
    power_price: Annotated[float | None, Option(help="$ per kWh, added to a --price in dollars.")] = None
    hardware_file: Annotated[Path | None, Option(help="TOML that overrides accelerators and constants.")] = None
    recipe: Annotated[Path | None, Option("--for", metavar="RECIPE", help="Plan a recipe: file or name.")] = None
    from_run: Annotated[
        Path | None,
        Option("--from", metavar="RUN", help="Compare a run with its plan: ours, or a log of verl, NeMo RL."),
    ] = None
    generation_layout: Annotated[str | None, Option(help="--from: of the run's engines, such as 'tp4'.")] = None
    training_layout: Annotated[str | None, Option(help="--from: of its training, such as 'tp2 dp8 fsdp'.")] = None
    out: Annotated[
        Path | None,
        Option(help="Write the recipe of --for, --settings or the hardware file of --from here. Default: print it."),
    ] = None
    settings: Annotated[
        str | None,
        Option(metavar="PROJECT", help="The plan for verl, openrlhf, slime, nemo-rl, trl, vllm or sglang; --out FILE."),
    ] = None
    as_json: Annotated[bool, Option("--json", help="Print data in place of tables.")] = False
    explain: Annotated[
        str | None, Option(metavar="WHAT", help="Formulas of the first plan: step, memory, cost, all, or a name.")
    ] = None
    page: Annotated[Path | None, Option(help="Write an HTML page.")] = None
    top: Annotated[int, Option(help="Plans in the table.")] = 10
    calibrate: Annotated[
        Path | None, Option(metavar="FILE", help="Measure this machine, write it as a --hardware-file, plan on it.")
    ] = None
