"""An environment in the wire form of Atropos: python atropos_environment.py GENERATOR_URL RECEIVER_URL PROMPT_IDS.

It registers, samples groups of four at the generator's endpoint, and posts each as a ScoredDataGroup.
"""

import json
import sys
import time
import urllib.error
import urllib.request

GROUP_SIZE = 4


def call(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def group(generator, prompt, version):
    document = {"tokens": [], "masks": [], "scores": [], "inference_logprobs": []}
    for index in range(GROUP_SIZE):
        asked = {"token_ids": prompt, "sampling_params": {"max_tokens": 8}}
        choice = call(f"{generator}/inference/v1/generate", asked)["choices"][0]
        ids = choice["token_ids"]
        document["tokens"].append(prompt + ids)
        document["masks"].append([-100] * len(prompt) + ids)
        document["inference_logprobs"].append(
            [1.0] * len(prompt) + [x["logprob"] for x in choice["logprobs"]["content"]]
        )
        document["scores"].append(float(index))
    return {**document, "group_overrides": {"policy_version": version}, "env_id": 0}


def main():
    generator, receiver, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    version = call(f"{receiver}/register-env", {"desired_name": "sums", "group_size": GROUP_SIZE})["starting_step"]
    while True:
        try:
            call(f"{receiver}/scored_data", group(generator, prompt, version))
            with urllib.request.urlopen(f"{receiver}/status-env", timeout=60) as response:
                version = json.loads(response.read())["current_step"]
        except urllib.error.HTTPError as error:
            # Such a group is older by now than the run takes, or there was no place.
            print(error.code, error.read()[:300], file=sys.stderr, flush=True)
            time.sleep(0.5)


if __name__ == "__main__":
    main()
