"""The sums world's character tokenizer, as a real Hugging Face tokenizer: one symbol, one token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

from plaudit.worlds.sums import SYMBOLS

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"

# A conversation is the concatenation of its contents: the world has no roles.
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def sums_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {symbol: i for i, symbol in enumerate([PAD, BOS, EOS, UNKNOWN, *SYMBOLS])}
    # BPE without merges is a character tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN,
        model_max_length=256, chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip
