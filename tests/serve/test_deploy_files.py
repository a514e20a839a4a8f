"""The files of deploy/ agree with the command line, the configuration and the routes."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml

from plaudit.cli import app
from plaudit.config.serve import ServeTable, parse_serve
from tests.command import plaudit_here

DEPLOY = Path(__file__).parents[2] / "deploy"
KEYS = "/etc/plaudit/keys"
CONFIG = "/etc/plaudit/serve.toml"


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of a command, parsed by the CLI; raises typer's error if that fails."""
    group: Any = typer.main.get_command(app)
    name, command, rest = group.resolve_command(typer.Context(group), arguments)
    assert name == "serve"
    with command.make_context(name, list(rest)) as context:
        return dict(context.params)


def checked(text: str) -> ServeTable:
    """Parse a configuration and check that it is not private, reads its keys from the mount and has a drain delay."""
    table = parse_serve(tomllib.loads(text), "deploy")
    assert not table.private
    assert table.api_key_file == f"{KEYS}/keys.toml"
    assert table.drain_delay > 0
    return table


def dockerfile() -> dict[str, list[str]]:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    steps: dict[str, list[str]] = {}
    for word, _, rest in lines:
        steps.setdefault(word, []).append(rest.strip())
    return steps


def test_the_image_runs_an_existing_command() -> None:
    steps = dockerfile()
    assert json.loads(steps["ENTRYPOINT"][0]) == ["plaudit"]
    assert parsed(json.loads(steps["CMD"][0]))["config"] == Path(CONFIG)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r'"\.\[(\w+)\]"', steps["RUN"][0])) <= set(project["optional-dependencies"])
    (torch,) = [each for each in project["dependencies"] if each.startswith("torch")]
    assert f'"{torch}"' in steps["RUN"][0]
    for copied in steps["COPY"]:
        for source in copied.split()[:-1]:
            assert (DEPLOY.parent / source).exists(), source
    port = checked((DEPLOY / "serve.toml").read_text()).port
    assert steps["EXPOSE"] == [str(port)]
    assert f"127.0.0.1:{port}/health/live" in steps["HEALTHCHECK"][0]
    assert steps["USER"][0] != "root"


def test_compose_file_matches_the_configuration() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert parsed(service["command"])["config"] == Path(CONFIG)
    table = checked((DEPLOY / "serve.toml").read_text())
    assert service["ports"] == [f"{table.port}:{table.port}"]
    mounts = dict(volume.split(":")[:2] for volume in service["volumes"])
    assert mounts["./serve.toml"] == CONFIG
    assert mounts["./keys"] == KEYS
    assert int(service["stop_grace_period"].removesuffix("s")) > table.drain_delay + table.drain_seconds


def test_kubernetes_manifest_matches_the_configuration() -> None:
    documents = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    config, deployment, service = (documents[kind] for kind in ("ConfigMap", "Deployment", "Service"))
    assert (config["apiVersion"], deployment["apiVersion"], service["apiVersion"]) == ("v1", "apps/v1", "v1")
    pod = deployment["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (container,) = pod["spec"]["containers"]
    assert parsed(container["args"])["config"] == Path(CONFIG)
    table = checked(config["data"]["serve.toml"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports[service["spec"]["ports"][0]["targetPort"]] == table.port
    for probe, path in (("startupProbe", "ready"), ("readinessProbe", "ready"), ("livenessProbe", "live")):
        request = container[probe]["httpGet"]
        assert (request["path"], ports[request["port"]]) == (f"/health/{path}", table.port)
    assert pod["spec"]["terminationGracePeriodSeconds"] > table.drain_delay + table.drain_seconds
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert volumes[mounts[CONFIG]["name"]]["configMap"]["name"] == config["metadata"]["name"]
    assert mounts[CONFIG]["subPath"] in config["data"]
    assert "subPath" not in mounts[KEYS], "which would keep a changed secret from arriving"
    assert "secret" in volumes[mounts[KEYS]["name"]]
    assert pod["spec"]["securityContext"]["runAsUser"] == int(dockerfile()["USER"][0])


def test_systemd_unit_matches_the_configuration() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(DEPLOY / "plaudit.service")
    service = unit["Service"]
    program, *arguments = shlex.split(service["execstart"])
    assert Path(program).name == "plaudit"
    assert parsed(arguments)["config"] == Path(CONFIG)
    table = checked((DEPLOY / "serve.toml").read_text())
    assert int(service["timeoutstopsec"]) > table.drain_delay + table.drain_seconds
    assert "-HUP" in service["execreload"]


def test_systemd_does_not_restart_a_wrong_configuration_for_ever(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.read(DEPLOY / "plaudit.service")
    service = unit["Service"]
    # RestartPreventExitStatus holds for the main process, and Restart=on-failure for all.
    assert not [key for key in service if key.startswith("exec") and key not in ("execstart", "execreload")]
    wrong = tmp_path / "serve.toml"
    wrong.write_text("nonsense = 1")
    code = plaudit_here("serve", "--config", str(wrong)).returncode
    assert code == int(service["restartpreventexitstatus"])
    most = float(unit["Unit"]["startlimitburst"]) * float(service["restartsec"])
    assert most < float(unit["Unit"]["startlimitintervalsec"]), "the limit would never be reached"
