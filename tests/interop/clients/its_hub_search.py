"""its_hub's beam search over steps, unchanged, with the process model of the server. In: url, key, writer, judge,
prompt. Out: for both ways to keep the step's delimiter the responses, their scores and their numbers of steps."""

import json
import sys

import requests
from its_hub.api import AbstractProcessRewardModel
from its_hub.core.algorithms.beam_search import BeamSearch
from its_hub.core.lms.openai_lm import OpenAICompatibleLanguageModel
from its_hub.core.lms.step_generation import StepGeneration

arguments = json.load(sys.stdin)


class ServedReward(AbstractProcessRewardModel):
    def score(self, prompt, responses):
        reply = requests.post(
            f"{arguments['url']}/v1/rewards", headers={"Authorization": f"Bearer {arguments['key']}"}, timeout=60,
            json={"model": arguments["judge"], "items": [{"prompt": str(prompt), "responses": list(responses)}]},
        )  # fmt: skip
        reply.raise_for_status()
        return reply.json()["items"][0]["scores"]

    async def ascore(self, prompt, responses):
        return self.score(prompt, responses)


found = []
for kept in (True, False):
    steps = StepGeneration(
        max_steps=8, step_token=";", stop_token="#", temperature=0.5, include_stop_str_in_output=kept
    )
    writer = OpenAICompatibleLanguageModel(
        endpoint=f"{arguments['url']}/v1", api_key=arguments["key"], model_name=arguments["writer"]
    )
    result = BeamSearch(steps, ServedReward(), 2).infer(
        writer, arguments["prompt"], budget=4, return_response_only=False
    )
    texts = [each["content"] for each in result.responses]
    found.append({"texts": texts, "scores": result.scores, "steps": result.steps_used})
print(json.dumps(found))
