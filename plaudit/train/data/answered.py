"""Stores a sample's prompt with it. Imports no torch, for tools that only read a run's dump."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plaudit.errors import DataError
from plaudit.records import Prompt, Sample

if TYPE_CHECKING:
    from plaudit.train.data.prompts import Prompts


def with_prompt(sample: Sample, prompt: Prompt, prompts: Prompts) -> Sample:
    """Return the sample with its prompt, so that it can be shown and scored again without its run."""
    question = {"prompt": prompt.text, "truth": prompt.truth, "right": prompts.right(prompt, sample)}
    if "messages" in prompt.extra:
        question["messages"] = prompt.extra["messages"]
    if prompt.columns.keys() - {"truth"}:
        question["columns"] = prompt.columns
    return replace(sample, extra={**sample.extra, **question})


def prompt_of(sample: Sample) -> Prompt:
    """Return the prompt that `with_prompt` stored in a sample."""
    if "truth" not in sample.extra:
        raise DataError("the dump has no prompts with its samples: an older Plaudit wrote it; generate it again")
    extra = {key: sample.extra[key] for key in ("messages",) if key in sample.extra}
    # The truth is one of the columns, under its name in the file.
    return Prompt(
        sample.extra["prompt"], sample.prompt_ids, sample.extra["truth"], extra | sample.extra.get("columns", {})
    )
