"""`plaudit doctor`, `launch`: checks whether machines are ready for a run, and starts runs on clusters."""

from pathlib import Path
from typing import Annotated

import typer

from plaudit.cli.app import Sets, app


@app.command("doctor")
def examine_machine(
    checks: Annotated[
        list[str], typer.Argument(help="versions, memory, disk, ports, clock, devices, ranks. Default: all.")
    ] = [],  # noqa: B006 (typer copies it)
    timeout: Annotated[float, typer.Option(min=1, help="Timeout of a check, in seconds.")] = 90.0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports.")] = False,
) -> None:
    """Check versions, devices, communication between ranks, disk, ports and clock. Exit code 1: something failed.

    Started by torchrun on several machines, it checks the links between all of them.
    """
    import os
    from dataclasses import asdict
    from json import dumps

    from plaudit.doctor.doctor import examine

    # Of torchrun's ranks the first tells what all found. Another has only its own failure to tell, for torchrun ends
    # all as soon as one has ended with a code.
    first = os.environ.get("RANK", "0") == "0"
    findings = []
    for finding in examine(checks, timeout):
        if first or (finding.check == "ranks" and finding.status == "failed"):
            findings.append(finding)
            if not json or not first:
                typer.echo(finding.line(), err=not first)
    if json and first:
        typer.echo(dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
    raise typer.Exit(int(any(finding.status == "failed" for finding in findings)))


@app.command("launch")
def write_job(
    recipe: Annotated[Path, typer.Argument(help="An RL recipe: a TOML file, or a name of `plaudit recipes`.")],
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a script for sbatch.")] = False,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Write a manifest for kubectl apply.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Machines that the ranks are distributed over.")] = 1,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs of each machine. Default: one for each of its processes.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer copies it)
    run: Annotated[Path | None, typer.Option(help="Run directory. Default: runs/<recipe stem>.")] = None,
    time: Annotated[str, typer.Option(metavar="D-HH:MM:SS", help="Slurm: time limit of the job.")] = "1-00:00:00",
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    account: Annotated[str | None, typer.Option(help="Slurm: the account.")] = None,
    image: Annotated[
        str, typer.Option(help="Kubernetes: the container image, built by deploy/Dockerfile.")
    ] = "plaudit:cuda",
    storage: Annotated[str, typer.Option(help="Kubernetes: size of the run's volume.")] = "100Gi",
    out: Annotated[Path | None, typer.Option(help="Write it to this file instead of printing it.")] = None,
) -> None:
    """Write a job that starts an RL recipe on a cluster: an sbatch script, or a Kubernetes manifest."""
    from plaudit.errors import ConfigError
    from plaudit.launch.job import Job
    from plaudit.launch.kubernetes import manifest
    from plaudit.launch.slurm import script

    if slurm == kubernetes:
        raise ConfigError("expected one of --slurm and --kubernetes")
    job = Job.of(recipe, sets, nodes=nodes, gpus=gpus, run=run)
    if slurm:
        text = script(job, time=time, partition=partition, account=account)
    else:
        text = manifest(job, image=image, storage=storage)
    if out is None:
        typer.echo(text, nl=False)
        return
    from plaudit.output import check_writable, written

    check_writable(out)
    with written(out) as file:
        file.write(text)
    typer.echo(f"{out}: {job.summary}; start it with {'sbatch' if slurm else 'kubectl apply -f'} {out}")
