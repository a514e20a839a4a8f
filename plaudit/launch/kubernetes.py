"""A Kubernetes manifest: an indexed Job with a pod for each machine; pods find the first one by its name."""

from __future__ import annotations

import posixpath
from typing import Any

import yaml

from plaudit.errors import ConfigError
from plaudit.launch.job import Job, quoted

RECIPE, WORK = "/etc/plaudit/recipe.toml", "/work"
PORT = 29500
RESTARTS = 3  # of each pod, before the job fails
USER = 10001  # of deploy/Dockerfile
LONGEST_NAME = 50  # of 63 characters: Kubernetes appends the pod's number


def manifest(job: Job, *, image: str, storage: str) -> str:
    if posixpath.isabs(job.run):
        raise ConfigError(
            f"--run {job.run} is a path of this machine: expected a path below {WORK}, the job's volume, such as "
            "runs/my"
        )
    name = f"plaudit-{job.name}"
    if len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} is longer than the {LONGEST_NAME} characters that Kubernetes allows: rename the recipe"
        )
    metadata = {"name": name, "labels": {"app": name}}
    claim = {
        "accessModes": ["ReadWriteMany" if job.machines > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": storage}},
    }
    # A headless service gives every pod a DNS name before it is ready, which is when the ranks connect to rank 0.
    service = {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": name},
        "ports": [{"name": "torchrun", "port": PORT}],
    }  # fmt: skip
    documents = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"recipe.toml": job.text}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _job(job, name, image)},
    ]
    head = (
        f"# Written by `plaudit launch --kubernetes`: {job.summary}.\n"
        f"# `kubectl apply -f THIS_FILE` starts it, `kubectl logs -f job/{name}` shows rank 0.\n"
        "# A failed pod is restarted and resumes from the last checkpoint, which is in the volume.\n"
    )
    return head + str(yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120))


def _job(job: Job, name: str, image: str) -> dict[str, Any]:
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 300,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
        "containers": [_container(job, name, image)],
        "volumes": [
            {"name": "recipe", "configMap": {"name": name}},
            {"name": "work", "persistentVolumeClaim": {"claimName": name}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "completionMode": "Indexed", "completions": job.machines, "parallelism": job.machines,
        "backoffLimit": RESTARTS * job.machines, "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }  # fmt: skip


def _container(job: Job, name: str, image: str) -> dict[str, Any]:
    torchrun = [
        "python", "-m", "torch.distributed.run", "--nnodes", str(job.nodes), "--nproc-per-node", str(job.ranks),
        "--node-rank", '"$JOB_COMPLETION_INDEX"', "--master-addr", f"{name}-0.{name}", "--master-port", str(PORT),
    ]  # fmt: skip
    # The recipe in the ConfigMap includes the changes of --set.
    train = ["-m", "plaudit", "train", RECIPE, "--out", job.run, "--resume"]
    lines = ["set -eu", quoted([*torchrun, "-m", "plaudit", "doctor"]), f"exec {quoted([*torchrun, *train])}"]
    if job.rollouts:  # the last pods; a restarted one finds the others running, and checks only itself
        there = [quoted(["python", "-m", "plaudit", "doctor"]), f"exec {quoted(['python', *job.generate()])}"]
        last = [f'if [ "$JOB_COMPLETION_INDEX" -ge {job.nodes} ]; then', *(f"  {line}" for line in there), "fi"]
        lines[1:1] = last
    requests: dict[str, Any] = {"cpu": str(job.cores)}
    container: dict[str, Any] = {
        "name": "ranks",
        "image": image,
        "workingDir": WORK,
        "command": ["bash", "-c", "\n".join(lines) + "\n"],
        "env": [
            {"name": "OMP_NUM_THREADS", "value": str(max(1, job.cores // job.most))},
            {"name": "HF_HOME", "value": f"{WORK}/.cache/huggingface"},
        ],
        "resources": {"requests": requests},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "recipe", "mountPath": RECIPE, "subPath": "recipe.toml", "readOnly": True},
            {"name": "work", "mountPath": WORK},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    if job.gpus:
        container["resources"]["limits"] = {"nvidia.com/gpu": str(job.gpus)}
    return container


class _Plain(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes multi-line text as block literals, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)
