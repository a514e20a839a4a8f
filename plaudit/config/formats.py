"""How a process model's input is written and where its step scores are read. A format is data, not a class.

The built-in ones follow, in this order:

    plain             `plaudit train` with task = "prm"
    math-shepherd     the model card of peiyi9979/math-shepherd-mistral-7b-prm (arXiv 2312.08935)
    llemma            hf_score.py of thu-wyz/inference_scaling (REBASE, arXiv 2408.00724), which ETS uses as well
    rlhflow           math/ of RLHFlow/RLHF-Reward-Modeling (Llama3.1-8B-PRM-Mistral-Data and -Deepseek-Data)
    qwen2.5-math-prm  the model card of Qwen/Qwen2.5-Math-PRM-7B (arXiv 2501.07301)
    skywork-o1-prm    SkyworkAI/skywork-o1-prm-inference
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, model_validator

from plaudit.config.table import Table
from plaudit.errors import nearest


class FormatTable(Table):
    chat: Literal["never", "given", "answer", "turns"] = "given"
    """never: no chat template; given: for prompts that come as messages; answer: always, the steps being the
    assistant's answer; turns: every step is a user's turn that the assistant answers with the tag."""
    system: str | None = None
    """System message put before a prompt that has none."""
    bos: bool = False
    """Begin with the begin token also where the tokenizer by itself would not."""
    prompt: str = "{prompt}"
    split: str = "\n\n"
    """What ends a step in a response that comes whole."""
    keep: bool = True
    """Whether that text stays part of the step."""
    strip: bool = False
    """Whether steps lose the white space around them."""
    step: str = "{step}"
    tag: str | None = None
    """Written after every step."""
    after: str = ""
    """Written between a tag and the next step."""
    joined: bool = False
    """Tokenised as one text, as the model was trained; otherwise prompt, steps and tags are tokenised apart."""
    end: bool = True
    """Whether a response whose last step `split` does not end is finished: the end token follows, and the last step is
    read there."""
    read: Literal["last", "tag", "before"] = "last"
    """At the last token of the step, at the last token of the tag, or at the token before the tag."""
    columns: tuple[str | int, ...] = ()
    """Of a causal LM: the tokens whose logits are read, the good one first. A text stands for its last token."""
    label: str | None = None
    """Of a class head: the label that means right; the last one without it."""
    activation: Literal["softmax", "sigmoid", "mean-sigmoid", "none"] = "softmax"
    tiled: bool = False
    """The rows of the vocabulary head repeat those of `columns` all the way; checked when the model is loaded."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "{prompt}" not in self.prompt or "{step}" not in self.step:
            raise ValueError(f"prompt needs a {{prompt}} and step a {{step}}, found {self.prompt!r} and {self.step!r}")
        if not self.split:
            raise ValueError('split is empty; give the text that ends a step, such as "\\n\\n"')
        if self.tag == "":
            raise ValueError("tag is empty; leave it out to read at the last token of a step")
        if (self.read == "last") != (self.tag is None):
            raise ValueError(f'read = "{self.read}" and tag = {self.tag!r}: with a tag read "tag" or "before"')
        if self.end and self.tag is not None:
            raise ValueError("end = true is for steps without a tag; set end = false")
        if self.joined and (self.chat != "never" or self.tag is None or self.read != "tag"):
            raise ValueError('joined = true needs chat = "never", a tag, and read = "tag"')
        if self.chat == "turns" and self.read != "before":
            raise ValueError('chat = "turns" needs a tag and read = "before"')
        if self.columns and self.label is not None:
            raise ValueError("columns are of a causal LM and label is of a class head: give one of them")
        return self


PLAIN = FormatTable()
FORMATS: dict[str, FormatTable] = {
    "plain": PLAIN,
    "math-shepherd": FormatTable(
        chat="never", prompt="{prompt} ", split="\n", keep=False, strip=True, step="{step} ", tag="ки", after="\n",
        joined=True, end=False, read="tag", columns=("+", "-"),
    ),
    # The export repeats two trained rows over the whole vocabulary, so the mean over two is the mean over all of it.
    "llemma": FormatTable(
        chat="never", prompt="{prompt} ", split="\n", keep=False, strip=True, step="{step} ", tag="ки", after="\n",
        joined=True, end=False, read="tag", columns=(0, 1), activation="mean-sigmoid", tiled=True,
    ),
    "rlhflow": FormatTable(
        chat="turns", prompt="{prompt} ", keep=False, strip=True, tag="+", end=False, read="before", columns=("+", "-"),
    ),
    "qwen2.5-math-prm": FormatTable(
        chat="answer", system="Please reason step by step, and put your final answer within \\boxed{}.", keep=False,
        strip=True, tag="<extra_0>", end=False, read="tag",
    ),
    "skywork-o1-prm": FormatTable(
        chat="never", bos=True, prompt="{prompt}\n", split="\n", keep=False, tag="\n", end=False, read="tag",
        activation="sigmoid",
    ),
}  # fmt: skip


def _named(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if value not in FORMATS:
        raise ValueError(f"unknown format {value!r}; {nearest(value, FORMATS)}")
    return FORMATS[value]


Format = Annotated[FormatTable, BeforeValidator(_named)]
"""A table, or the name of a built-in one."""
