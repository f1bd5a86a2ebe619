"""Groups as Atropos' environments post them: recorded in its form, put into a run, refused by name."""

import copy
import runpy

import pytest
from aiohttp.test_utils import TestClient, TestServer

from penstock.clients import BrokerClient
from penstock.errors import InvalidFieldError
from penstock.wire.codec import float32_array, int32_array
from penstock.wire.scored_data import read_scored_data
from services.broker.storage.memory_store import MemoryStore
from tests.helpers.brokers.broker import RUN, Trainer, serving
from tests.helpers.console import ROOT

# What an environment with a tool posts: a prompt of two tokens, and a tool's answer in the middle of the first sample.
GROUP = {
    "tokens": [[5, 6, 7, 8, 9, 2], [5, 6, 7, 2]],
    "masks": [[-100, -100, 7, -100, 9, 2], [-100, -100, 7, 2]],
    "scores": [1.0, 0.0],
    "advantages": None,
    "ref_logprobs": None,
    "messages": [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "ab"}]],
    "generation_params": {"temperature": 1.0},
    "inference_logprobs": [[1.0, 1.0, -0.5, 1.0, -0.25, -0.125], [1.0, 1.0, -0.5, -2.0]],
    "overrides": None,
    "group_overrides": {"policy_version": 0},
    "images": None,
    "env_id": 0,
}


def changed(**fields):
    return {**copy.deepcopy(GROUP), **fields}


def test_given_tokens_are_masked_and_what_samples_share_is_the_prompt():
    group = read_scored_data(GROUP, group_id="g")
    assert int32_array(group.prompt.token_ids, "").tolist() == [5, 6]
    first, second = group.trajectories
    assert int32_array(first.token_ids, "").tolist() == [7, 8, 9, 2]
    assert list(first.loss_mask) == [1, 0, 1, 1]
    assert float32_array(first.behavior_logprobs, "").tolist() == [-0.5, 0.0, -0.25, -0.125]
    assert (first.score.value, second.score.value) == (1.0, 0.0)
    assert read_scored_data(changed(group_overrides=None), group_id="g", policy_version=4).min_policy_version == 4


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": [[5, 6, 7, 8, 9, -2], [5, 6, 7, 2]]}, "tokens: token ids"),
        ({"tokens": [["a"], [5]]}, "tokens: must be whole"),
        ({"masks": [[-100], [-100]]}, "masks: one entry"),
        (
            {"masks": [[-100, -100, 7, 1, 9, 2], [-100, -100, 7, 2]]},
            r"masks\[0\]\[3\]: 1; must be -100 or the token, 8",
        ),
        ({"masks": [[5, 6, 7, 8, 9, 2], [5, 6, 7, 2]]}, "same given token"),
        ({"masks": [[-100] * 6, [-100] * 4]}, "no token was sampled"),
        ({"inference_logprobs": None}, "inference_logprobs"),
        ({"inference_logprobs": [[0.0] * 6, [0.0, 0.0, 0.5, 0.0]]}, r"inference_logprobs\[1\]\[2\]: 0.5"),
        ({"scores": [1.0]}, "scores"),
        ({"scores": [1.0, float("nan")]}, "scores"),
        ({"group_overrides": None}, "policy_version: None"),
        ({"images": ["x"]}, "images"),
    ],
)
def test_a_group_that_cannot_be_trained_on_names_the_field(fields, named):
    with pytest.raises(InvalidFieldError, match=named):
        read_scored_data(changed(**fields), group_id="g")


async def test_an_environment_of_atropos_registers_and_posts_groups_into_a_run():
    receiver_of = runpy.run_path(str(ROOT / "examples" / "atropos" / "receive.py"))["Receiver"]
    async with serving(MemoryStore()) as broker:
        await broker.open(groups_per_step=4, group_size=2, max_completion_tokens=64, max_staleness=1)
        address = f"127.0.0.1:{broker.server.port}"
        async with BrokerClient(address) as client, client.producer(RUN) as producer:
            server = TestServer(receiver_of(client, producer, RUN, age=None).application())
            async with TestClient(server) as http:
                registration = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
                registered = await (await http.post("/register-env", json=registration)).json()
                assert (registered["status"], registered["env_id"], registered["starting_step"]) == ("success", 0, 0)
                status = await (await http.get("/status-env", json={"env_id": 0})).json()
                assert (status["current_step"], status["env_weight"]) == (0, 1.0)
                assert await (await http.post("/scored_data", json=GROUP)).json() == {"status": "received"}
                # One that is posted again, as after a lost answer, counts once.
                others = [changed(scores=[1.0, 0.5]), GROUP]
                many = await (await http.post("/scored_data_list", json=others)).json()
                assert many == {"status": "received", "groups_processed": 2}
                refused = await http.post("/scored_data", json=changed(scores=[1.0]))
                assert refused.status == 422
                assert "scores" in (await refused.json())["error"]
            assert (await client.audit(RUN)).submitted == 4
        groups = await Trainer.connect(broker.channel).groups(2)
    assert [[each.score.value for each in group.trajectories] for group in groups] == [[1.0, 0.0], [1.0, 0.5]]
