"""An sbatch script: one torchrun on each machine, which connect to the first one over TCP."""

from __future__ import annotations

import sys

from plaudit.launch.job import Job, quoted

SAVE_SECONDS = 300  # before the time limit, to finish the step and write a checkpoint


def script(job: Job, *, time: str, partition: str | None, account: str | None) -> str:
    options = {
        "job-name": f"plaudit-{job.name}", "nodes": job.machines, "ntasks-per-node": 1, "cpus-per-task": job.cores,
        "gpus-per-node": job.gpus or None, "time": time, "partition": partition, "account": account,
        "output": "%x-%j.log", "open-mode": "append",
    }  # fmt: skip
    header = "".join(f"#SBATCH --{name}={value}\n" for name, value in options.items() if value is not None)
    threads = max(1, job.cores // job.most)
    return f"""#!/bin/bash
# Written by `plaudit launch --slurm`: {job.summary}.
# Start it with sbatch, in a directory that all machines share. When submitted again, also by Slurm after a failure, it
# resumes from the last checkpoint.
{header}#SBATCH --requeue
#SBATCH --signal=TERM@{SAVE_SECONDS}
set -euo pipefail
PYTHON=${{PYTHON:-{quoted([sys.executable])}}}  # of an environment that all machines see
export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{threads}}}
cd "${{SLURM_SUBMIT_DIR:-.}}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# Links, devices, versions and clocks of all machines, before anything loads.
srun --kill-on-bad-exit=1 {quoted([*_torchrun(job.machines, job.most), "-m", "plaudit", "doctor"])}

{_run(job)}"""


def _run(job: Job) -> str:
    train = quoted([*_torchrun(job.nodes, job.ranks), *job.train()])
    if not job.rollouts:
        return f"srun --kill-on-bad-exit=1 {train}\n"
    there = quoted(['"$PYTHON"', *job.generate()])
    return f"""# The last machines generate, until the run is finished.
srun {_part(job.nodes, job.rollouts)} --kill-on-bad-exit=1 {there} &
srun {_part(0, job.nodes)} --kill-on-bad-exit=1 {train}
wait
"""


def _torchrun(nodes: int, ranks: int) -> list[str]:
    return [
        '"$PYTHON"', "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", str(ranks),
        "--rdzv-backend", "c10d", "--rdzv-id", '"$SLURM_JOB_ID"', "--rdzv-endpoint", '"$head:$port"',
    ]  # fmt: skip


def _part(first: int, count: int) -> str:
    return f"--nodes {count} --ntasks {count} --relative {first}"
