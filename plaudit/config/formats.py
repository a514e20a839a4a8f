"""Process model formats: how the input is written and where step scores are read. A format is data, not a class.

The built-in formats, in this order:

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
    """never: no chat template; given: for prompts given as messages; answer: always, with the steps as the
    assistant's answer; turns: every step is a user turn that the assistant answers with the tag."""
    system: str | None = None
    """System message for a prompt that has none."""
    bos: bool = False
    """Add the BOS token even if the tokenizer does not by default."""
    prompt: str = "{prompt}"
    split: str = "\n\n"
    """The text that ends a step, for splitting whole responses."""
    keep: bool = True
    """Whether that text stays part of the step."""
    strip: bool = False
    """Whether surrounding white space is stripped from steps."""
    step: str = "{step}"
    tag: str | None = None
    """Written after every step."""
    after: str = ""
    """Written between a tag and the next step."""
    joined: bool = False
    """Tokenise as one text, as the model was trained; otherwise prompt, steps and tags are tokenised separately."""
    end: bool = True
    """Whether a response whose last step does not end with `split` is finished: the EOS token is added, and the last
    step's score is read there."""
    read: Literal["last", "tag", "before"] = "last"
    """Where scores are read: at the last token of the step, the last token of the tag, or the token before the tag."""
    columns: tuple[str | int, ...] = ()
    """Causal LM: the tokens whose logits are read, the one for a correct step first. A text stands for its last
    token."""
    label: str | None = None
    """Classification head: the label for a correct step. Default: the last one."""
    activation: Literal["softmax", "sigmoid", "mean-sigmoid", "none"] = "softmax"
    tiled: bool = False
    """Whether the rows of the vocabulary head repeat those of `columns` throughout; checked at model load."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "{prompt}" not in self.prompt or "{step}" not in self.step:
            raise ValueError(
                f"prompt = {self.prompt!r} must contain {{prompt}}, and step = {self.step!r} must contain {{step}}"
            )
        if not self.split:
            raise ValueError('split is empty; set it to the text that ends a step, such as "\\n\\n"')
        if self.tag == "":
            raise ValueError("tag is empty; remove it to read scores at the last token of a step")
        if (self.read == "last") != (self.tag is None):
            raise ValueError(
                f'read = "{self.read}" and tag = {self.tag!r}: with a tag, read must be "tag" or "before"; without '
                'one, "last"'
            )
        if self.end and self.tag is not None:
            raise ValueError("end = true is for steps without a tag; set end = false")
        if self.joined and (self.chat != "never" or self.tag is None or self.read != "tag"):
            raise ValueError('joined = true needs chat = "never", a tag, and read = "tag"')
        if self.chat == "turns" and self.read != "before":
            raise ValueError('chat = "turns" needs a tag and read = "before"')
        if self.columns and self.label is not None:
            raise ValueError("columns are for a causal LM and label is for a classification head: give one of them")
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
