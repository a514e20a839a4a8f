"""What a sample answers, kept with it. Torch-free, for those who only read what a run has dumped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plaudit.errors import DataError
from plaudit.records import Prompt, Sample

if TYPE_CHECKING:
    from plaudit.train.data.prompts import Prompts


def with_prompt(sample: Sample, prompt: Prompt, prompts: Prompts) -> Sample:
    """The sample with what it answers, so that it can be shown, and checked again, without the run it is from."""
    question = {"prompt": prompt.text, "truth": prompt.truth, "right": prompts.right(prompt, sample)}
    if "messages" in prompt.extra:
        question["messages"] = prompt.extra["messages"]
    if prompt.columns.keys() - {"truth"}:
        question["columns"] = prompt.columns
    return replace(sample, extra={**sample.extra, **question})


def prompt_of(sample: Sample) -> Prompt:
    """What `with_prompt` put into a sample."""
    if "truth" not in sample.extra:
        raise DataError("its samples do not say what they answer: it is of an older Plaudit; make it anew")
    extra = {key: sample.extra[key] for key in ("messages",) if key in sample.extra}
    # Its truth is among the columns, under the name that it has in the file.
    return Prompt(
        sample.extra["prompt"], sample.prompt_ids, sample.extra["truth"], extra | sample.extra.get("columns", {})
    )
