from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.errors import ModelError
from plaudit.models import catalog


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_resolve_model_directory_run_and_latest_checkpoint(tmp_path: Path) -> None:
    plain = directory(tmp_path / "plain")
    final = directory(tmp_path / "run" / "final")
    latest = directory(tmp_path / "killed" / "checkpoints" / "step-4" / "model")
    (tmp_path / "killed" / "checkpoints" / "latest").write_text("step-4\n")
    assert catalog.resolve(plain) == plain
    assert catalog.resolve(str(tmp_path / "run")) == final
    assert catalog.resolve(tmp_path / "killed") == latest


def test_embedded_names_are_resolved_and_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "EMBEDDED", tmp_path)
    inside = directory(tmp_path / "sums-policy")
    (tmp_path / "notes").mkdir()
    assert catalog.embedded_names() == ("sums-policy",)
    assert catalog.resolve("sums-policy") == inside
    with pytest.raises(ModelError, match="did you mean 'sums-policy'"):
        catalog.resolve("sums-polcy")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/some-model", "`plaudit pull org/some-model` fetches it"),
        ("https://host/model", "is a URL; models are loaded from local directories only"),
        ("", "no model"),
    ],
)
def test_missing_models_are_reported_in_one_line(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message) as caught:
        catalog.resolve(name)
    assert "\n" not in str(caught.value)


def test_resolve_errors_name_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"looked for config.json, final/config.json and checkpoints/latest"):
        catalog.resolve(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="merge the adapter"):
        catalog.resolve(tmp_path)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="import it first: plaudit import "):
        catalog.resolve(file)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("../../etc")
    with pytest.raises(ModelError, match="not a subdirectory"):
        catalog.resolve(tmp_path)


def test_catalog_does_not_import_torch_or_transformers() -> None:
    code = "import plaudit.models.catalog, sys; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_exported_name_exists() -> None:
    import plaudit.models

    for name in plaudit.models.__all__:
        value = getattr(plaudit.models, name)
        assert getattr(plaudit.models, name) is value
        assert not isinstance(value, type(plaudit.models))
