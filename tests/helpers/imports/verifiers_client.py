"""Two turns by the train client of verifiers, run by its own interpreter: python verifiers_client.py URL MODEL_DIR."""

import asyncio
import json
import sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig


async def main(base_url: str, model_dir: str) -> None:
    config = TrainClientConfig(base_url=base_url, api_key_var="NO_SUCH_KEY", renderer_model_name=model_dir)
    client = TrainClient(config)
    messages = [{"role": "user", "content": "2+2?"}]
    turns = []
    for reply in ("again", None):
        body = {"model": "tiny", "messages": messages}
        answer = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=40), session_id="session-1")
        turns.append(
            {
                "prompt": answer.tokens.prompt_ids,
                "sampled": answer.tokens.completion_ids,
                "logprobs": answer.tokens.completion_logprobs,
                "content": answer.message.content,
                "finish_reason": answer.finish_reason,
            }
        )
        messages += [{"role": "assistant", "content": answer.message.content}, {"role": "user", "content": reply}]
    refused = ""
    try:
        long = {"model": "tiny", "messages": [{"role": "user", "content": "x" * 5000}]}
        await client.get_response(ChatDialect(), long, SamplingConfig(), session_id="session-2")
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    await client.close()
    print(json.dumps({"turns": turns, "refused": refused}))


asyncio.run(main(*sys.argv[1:]))
