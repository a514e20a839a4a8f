"""NeMo Gym's server of a vLLM model, unchanged, with token ids for training. In: url, key, model, prompt. Out: the
messages of its Responses API and of its chat completions, with tokens and log-probs."""

import json
import os
import sys

os.environ["NEMO_GYM_CONFIG_DICT"] = "{}"  # as its main process sets it for the servers that it starts

from fastapi.testclient import TestClient
from nemo_gym.server_utils import BaseServerConfig, ServerClient
from omegaconf import OmegaConf
from responses_api_models.vllm_model.app import VLLMModel, VLLMModelConfig

arguments = json.load(sys.stdin)
config = VLLMModelConfig(
    host="127.0.0.1", port=0, entrypoint="", name="policy_model", base_url=f"{arguments['url']}/v1",
    api_key=arguments["key"], model=arguments["model"], return_token_id_information=True, uses_reasoning_parser=False,
)  # fmt: skip
head = BaseServerConfig(host="127.0.0.1", port=1)
server = VLLMModel(
    config=config, server_client=ServerClient(head_server_config=head, global_config_dict=OmegaConf.create({}))
)
question = [{"role": "user", "content": arguments["prompt"]}]
with TestClient(server.setup_webserver()) as client:
    asked = {"input": question, "temperature": 0.0, "max_output_tokens": 24}
    response = client.post("/v1/responses", json=asked)
    response.raise_for_status()
    chat = client.post("/v1/chat/completions", json={"messages": question, "temperature": 0.0, "max_tokens": 24})
    chat.raise_for_status()
print(json.dumps({"response": response.json()["output"][-1], "chat": chat.json()["choices"][0]["message"]}))
