"""lm-evaluation-harness' local-completions, unchanged. In: url, key, model, tokenizer, pairs, texts. Out: the
log-likelihoods of the pairs' continuations with whether they are greedy, of whole texts, and a generated text."""

import json
import os
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

arguments = json.load(sys.stdin)
os.environ["OPENAI_API_KEY"] = arguments["key"]
model = LocalCompletionsAPI(
    model=arguments["model"], base_url=f"{arguments['url']}/v1/completions", tokenizer_backend="huggingface",
    tokenizer=arguments["tokenizer"], max_length=256, batch_size=2,
)  # fmt: skip
pairs = [Instance("loglikelihood", {}, tuple(pair), 0) for pair in arguments["pairs"]]
rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in arguments["texts"]]
until = {"until": [";"], "max_gen_toks": 20, "temperature": 0}
print(json.dumps({
    "pairs": model.loglikelihood(pairs, disable_tqdm=True),
    "rolling": model.loglikelihood_rolling(rolling, disable_tqdm=True),
    "generated": model.generate_until([Instance("generate_until", {}, (arguments["pairs"][0][0], until), 0)]),
}))  # fmt: skip
