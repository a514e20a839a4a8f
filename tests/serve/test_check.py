"""`plaudit serve --check` prints a line for each problem that would prevent a start, and one for each passed check."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from plaudit.config import to_toml
from tests.command import plaudit_here
from tests.models.encoders import encoder

from .hostile import copied
from .process import free_port

RULE = {"kind": "rule", "rule": "regex", "pattern": "#12$"}


def check(tree: dict[str, Any], directory: Path, *flags: str) -> tuple[int, list[str]]:
    file = directory / "serve.toml"
    file.write_text(to_toml(tree))
    result = plaudit_here("serve", "--config", str(file), "--check", *flags)
    return result.returncode, (result.stdout + result.stderr).splitlines()


def test_a_valid_configuration_passes_all_checks(tmp_path: Path) -> None:
    plaudit_here("keys", "add", "ann", "--file", str(tmp_path / "keys.toml"))
    port = free_port()
    tree = {
        "port": port, "api_key_file": str(tmp_path / "keys.toml"), "model_root": str(tmp_path),
        "models": {
            "sums": {"path": "sums"}, "steps": {"path": "sums-steps"}, "teacher": {"path": "sums-policy"}, "rule": RULE,
            "both": {"kind": "blend", "members": {"sums": 1.0, "rule": 1.0}},
        },
    }  # fmt: skip
    code, lines = check(tree, tmp_path)
    assert code == 0, lines
    assert all(line.startswith("ok: ") for line in lines)
    names = [line.removeprefix("ok: ").partition(": ")[0] for line in lines]
    models = [f"model {name}" for name in ("sums", "steps", "teacher", "rule", "both")]
    assert names == [*models, "protocols", "keys", "tls", "address", "model_root", "state_file"]
    assert f"ok: address: http://127.0.0.1:{port}" in lines
    with socket.create_server(("127.0.0.1", port)):
        pass  # the check has left the port free


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_an_encoder_with_several_labels_passes(tmp_path: Path, family: str) -> None:
    """The server serves it too: without weights, for protocols that return labels."""
    code, lines = check(
        {"models": {"rerank": {"path": str(encoder(tmp_path / "encoder", family, 3))}}}, tmp_path, "--port", "0"
    )
    assert code == 0, lines
    assert lines[0].startswith("ok: model rerank: outcome")


def test_every_problem_is_reported_on_its_own_line(tmp_path: Path) -> None:
    """All at once; passed checks are printed too."""
    cut = copied("sums", tmp_path / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[:-100])
    coded = copied("sums", tmp_path / "coded", auto_map={"AutoModel": "evil.Model"})
    mixed = copied("sums", tmp_path / "mixed")
    (mixed / "tokenizer.json").unlink()
    (tmp_path / "keys.toml").write_text("[ann]\nsha256 = 'no'\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tree = {
            "port": listener.getsockname()[1], "api_key_file": str(tmp_path / "keys.toml"), "protocols": ["tritton"],
            "model_root": str(tmp_path / "missing"), "tls_cert": str(tmp_path / "no.crt"), "tls_key": "no.key",
            "state_file": str(tmp_path / "nowhere" / "state.json"),
            "models": {
                "good": {"path": "sums"}, "cut": {"path": str(cut)}, "coded": {"path": str(coded)},
                "mixed": {"path": str(mixed)},
                "rule": {"kind": "rule", "rule": "function", "function": "nowhere:score"},
                "steps": {"path": "sums-policy", "kind": "process", "format": "math-shepherd"},
            },
        }  # fmt: skip
        code, lines = check(tree, tmp_path)
    assert code == 2
    faults = {
        "model cut": "cut", "model coded": "auto_map", "model mixed": "tokenizer", "model rule": "nowhere",
        "model steps": "format.columns", "protocols": "'triton'", "keys": "sha256", "tls": "no.crt",
        "address": "cannot listen", "model_root": "missing", "state_file": "does not exist",
    }  # fmt: skip
    assert [line for line in lines if line.startswith("ok: ")] == [line for line in lines if "model good" in line]
    for check_name, words in faults.items():
        (line,) = [line for line in lines if line.startswith(f"error: {check_name}: ")]
        assert words in line
    assert len(lines) == len(faults) + 1


@pytest.mark.parametrize(
    ("tree", "message"), [({"prot": 1}, "'port'"), ({"models": {"a": {"path": "/no/such"}}}, "/no/such")]
)
def test_an_invalid_configuration_is_reported_in_one_line(tmp_path: Path, tree: dict[str, Any], message: str) -> None:
    code, lines = check(tree, tmp_path)
    assert (code, len(lines)) == (2, 1)
    assert message in lines[0]
