"""Problems from inventories: what probes and files say, and what is asked for by name."""

import json
from dataclasses import replace

import pytest
import yaml

from console.plan.build_problem import Sources, build_problem, write_problem
from console.plan.lengths import MAX_VALUES, output_lengths
from console.recording.writer import open_writer
from penstock.config import ConfigError
from penstock.wire.score_rules import ENVIRONMENT_WAIT_S
from services.scheduler.problem.cost_constants import CostConstants
from services.scheduler.problem.problem import read_problem
from services.scheduler.problem.workload import EnvironmentWork
from tests.helpers.brokers.recordings import recorded
from tests.helpers.console import penstock_in_process, write_rows
from tests.helpers.plans.probes import GPU, document, host, link, make_model, reward, write

L4 = {"type": "gpu", "kind": "L4", "count": 1, "memory_GB": 24.2}
STATED = {"prompts_per_step": 16, "group_size": 4, "staleness": 2}


@pytest.fixture
def sources(tmp_path):
    writer = open_writer(tmp_path / "recording.jsonl")
    writer.write([recorded(), recorded(index=1)])
    writer.end_step()
    writer.close()
    return Sources(
        inventory=tmp_path / "inventory",
        model=make_model(tmp_path / "model"),
        data=tmp_path / "recording.jsonl",
        **STATED,
    )


def built(sources, *documents):
    return build_problem(write(sources.inventory, *documents), sources)


def refusal(sources, *documents):
    with pytest.raises(ConfigError) as refused:
        built(sources, *documents)
    return str(refused.value).splitlines()


def two_sites():
    return (
        document("gpu-1"),
        document("gpu-2", matrix_tflops_bf16=260.0, links=[link("gpu-1", "here", gbps=40)]),
        document("l4-a", site="there", accelerators=L4, allreduce=None, links=[link("gpu-1", "here")]),
    )


def test_machines_types_and_links_are_those_that_were_probed(sources):
    problem = built(sources, *two_sites()).problem
    assert {name: (gpu.tflops_bf16, gpu.hbm_GB) for name, gpu in problem.gpu_types.items()} == {
        "A100-80": (255.0, 85.9),
        "L4": (250.0, 24.2),
    }
    assert [(node.gpu, node.gpus, node.region, node.machines, node.nic_Gbps) for node in problem.nodes] == [
        ("A100-80", 8, "here", ("gpu-1", "gpu-2"), 40.0),
        ("L4", 1, "there", ("l4-a",), 100.0),
    ]
    (between,) = problem.links
    assert (between.a, between.b, between.bw_Gbps, between.latency_ms) == ("here", "there", 5.0, 15.0)
    model, workload = problem.model, problem.workload
    assert (model.q_heads, model.kv_heads, model.head_dim, model.ffn, model.tied_embeddings) == (4, 2, 16, 128, True)
    assert (workload.prompts_per_step, workload.group_size, workload.staleness) == (16, 4, 2)
    assert workload.output_len.moments()[0] == len(recorded().trajectory.token_ids) / 4


def test_passes_say_which_share_of_its_matrix_rate_a_type_trains_and_scores_with(sources):
    first, second, third = two_sites()
    rates = {"model": "m", "forward_tflops": 125.0, "forward_backward_tflops": 100.0}
    problem = built(sources, {**first, "passes": rates}, second, third).problem
    assert [problem.cost_model.mfu("A100-80", kind) for kind in ("infer", "train")] == [0.5, 0.4]
    stated = CostConstants()
    assert problem.cost_model.mfu("L4", "train") == stated.mfu("L4", "train")
    fast = built(sources, {**first, "passes": {**rates, "forward_tflops": 500.0}}, second, third)
    assert fast.problem.cost_model.mfu("A100-80", "infer") == 1.0
    assert any("faster than the matrix product on A100-80" in note for note in fast.notes)


def test_the_wait_for_an_environment_comes_from_a_recordings_scores(sources, tmp_path):
    assert built(sources, *two_sites()).problem.workload.environment is None
    waits = [recorded(index=index) for index in range(2)]
    for seconds, each in zip(("2.5", "7.500"), waits, strict=True):
        each.trajectory.score.details[ENVIRONMENT_WAIT_S] = seconds
    for suffix in ("jsonl", "parquet"):
        data = tmp_path / f"sessions.{suffix}"
        writer = open_writer(data)
        writer.write([*waits, recorded(index=2)])
        writer.end_step()
        writer.close()
        problem = built(replace(sources, data=data), *two_sites()).problem
        assert problem.workload.environment == EnvironmentWork(wait_s=5.0)


def test_the_written_problem_is_the_same_and_plans_have_the_machines_names(sources, tmp_path):
    found = built(sources, *two_sites())
    write_problem(tmp_path / "problem.yaml", found)
    assert read_problem(tmp_path / "problem.yaml") == found.problem
    result = penstock_in_process("plan", "problem.yaml", "--budget-s", "2", cwd=tmp_path)
    assert result.exit_code == 0, result.output
    assert "gpu-1" in result.output
    assert "gpu-1-0" not in result.output


def test_everything_that_is_missing_is_asked_for_in_one_list(sources, tmp_path):
    nothing = Sources(inventory=sources.inventory)
    lines = refusal(nothing, document(allreduce=None, absent={"allreduce": "left out by --skip"}))
    assert [line.split(":")[0] for line in lines] == [
        "gpu_types.A100-80.ar_bus_GBps",
        "model",
        "workload.prompts_per_step",
        "workload.group_size",
        "workload.staleness",
        "workload.prompt_len",
    ]
    assert "left out by --skip (gpu-1); run penstock probe on it again, without --skip allreduce" in lines[0]
    assert "give --group-size, or the run with --run" in lines[3]


def test_sites_without_a_measured_link_are_named_with_the_commands_that_measure_it(sources):
    (line,) = refusal(sources, document(), document("l4-a", site="there", accelerators=L4, allreduce=None))
    assert line.startswith("links: none is measured between sites here and there; run penstock probe --listen")
    assert "--with gpu-1:7309 on l4-a" in line


def test_one_device_is_too_few(sources):
    cpus = {"type": "cpu", "kind": "EPYC, 2 cores", "count": 1, "memory_GB": 24.0}
    (line,) = refusal(sources, document(accelerators=cpus, allreduce=None))
    assert line.startswith("nodes: gpu-1 is one device")
    assert line.endswith("probe more machines, or this one with --cpu-devices 2")


def test_a_busy_or_slow_machine_is_named(sources):
    busy = document("gpu-2", is_busy=True, busy_because=["other processes used 40% of the CPUs"])
    slow = document("gpu-3", matrix_tflops_bf16=100.0)
    notes = built(sources, document(), busy, slow).notes
    assert notes[0].startswith("gpu-2 was busy while it was probed (other processes used 40% of the CPUs)")
    assert notes[1].startswith("gpu-3 reached 40% of the matrix rate of machines like it")


def run_file(folder, sources, **node):
    nodes = folder / "node.yaml"
    generator = {"run_id": "r", "model_path": str(sources.model), "cache_dir": "cache"}
    stated = {"node_id": "gpu-1", "gpu": GPU["kind"], "gpus": 8, "scheduler": "s:1", "dir": "d", **node}
    nodes.write_text(yaml.safe_dump({**stated, "generator": generator}))
    run = {
        "run": {"id": "r"},
        "model": {"path": str(sources.model)},
        "data": {"train": "rows.jsonl"},
        "algorithm": {"prompts_per_step": 10, "group_size": 2, "max_staleness": 3, "kl_coefficient": 0.1},
        "sampling": {"max_new_tokens": 777},
        "generator": {"max_concurrent_samples": 33},
        "scheduler": {"problem": "problem.yaml", "nodes": [str(nodes)]},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return path


def test_a_run_gives_what_flags_do_not(sources, tmp_path):
    run = run_file(tmp_path, sources)
    problem = built(Sources(inventory=sources.inventory, data=sources.data, run=run, group_size=5), document()).problem
    workload, constants = problem.workload, problem.cost_model
    assert (workload.prompts_per_step, workload.group_size, workload.staleness) == (10, 5, 3)
    assert [(task.name, task.kind) for task in workload.train_tasks] == [
        ("actor_train", "train"),
        ("reference", "infer"),
    ]
    assert (workload.output_len.longest, constants.max_num_seqs, constants.train_pack_tokens) == (777, 33, 1024)
    own = yaml.safe_load(run.read_text())
    for elsewhere, planned in (({}, ["critic", "critic_train"]), ({"critic": "far:7309"}, [])):
        algorithm = {**own["algorithm"], "name": "ppo", "critic": "service"}
        run.write_text(yaml.safe_dump({**own, "algorithm": algorithm, "endpoints": elsewhere}))
        problem = built(Sources(inventory=sources.inventory, data=sources.data, run=run), document()).problem
        assert [task.name for task in problem.workload.critic_tasks] == planned


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"node_id": "gpu-7"}, "node_id: 'gpu-7' is not in the inventory (gpu-1)"),
        ({"gpu": "H100"}, "gpu: 'H100', and the probe has 'A100-80' for gpu-1"),
        ({"gpus": 4}, "gpus: 4, and the probe has 8 for gpu-1"),
    ],
)
def test_machines_of_a_run_that_differ_from_the_inventory_are_refused(sources, tmp_path, node, said):
    run = run_file(tmp_path, sources, **node)
    (line,) = refusal(Sources(inventory=sources.inventory, data=sources.data, run=run), document())
    assert said in line


def decoded(*, faster):
    # 1 G parameters of two bytes: read in 1.57 ms at 0.75 of 1,700 GB/s; computed in 0.0133 ms a sequence.
    points = [
        {"batch": batch, "step_s": (max(2e9 / 1.275e12, batch * 2e9 / 150e12) + 0.004 + batch * 30e-6) / faster}
        for batch in (1, 4, 16, 64, 256)
    ]
    return {"engine": "vllm 0", "model": "m", "params": 1e9, "layers": 9, "weight_bytes": 2, "points": points}


def test_decode_steps_give_the_overheads_that_the_cost_model_lacks(sources):
    odd = document("gpu-2", decode=decoded(faster=10))
    found = built(sources, document(decode=decoded(faster=1)), odd)
    constants = found.problem.cost_model
    assert constants.step_overhead_s == pytest.approx(0.004)
    assert constants.sequence_overhead_s == pytest.approx(30e-6)
    (note,) = found.notes
    assert note == "gpu-2 decoded faster than the rates measured on it allow, so its decode steps are not used"


def test_trainers_offload_at_the_rates_of_the_slowest_machine(sources):
    assert "host_link_GBps" not in built(sources, document()).problem.cost_model.model_fields_set
    measured = document("gpu-2", host_link_GBps=22.0, host_memory_GBps=90.0)
    found = built(sources, document(host_link_GBps=25.0), measured).problem.cost_model
    assert (found.host_link_GBps, found.host_memory_GBps) == (22.0, 90.0)


def test_many_lengths_are_stated_as_quantiles_with_the_same_mean():
    seen = list(range(1, 5001))
    found = output_lengths(seen, longest=None)
    assert len(found["values"]) == MAX_VALUES
    assert sum(found["values"]) / MAX_VALUES == pytest.approx(2500.5, rel=0.01)
    assert found["max"] == 5000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "PROBLEM: name a problem's file, or a folder of probes with --inventory"),
        (("p.yaml", "--inventory", "i"), "--inventory: p.yaml states the cluster; leave out one of the two"),
        (("p.yaml", "--group-size", "3"), "--group-size: has no effect on p.yaml"),
    ],
)
def test_sources_that_do_not_fit_are_refused(tmp_path, arguments, said):
    result = penstock_in_process("plan", *arguments, cwd=tmp_path)
    assert result.exit_code == 2
    assert said in result.output


def test_machines_without_gpus_are_hosts_of_which_the_strongest_has_the_broker(sources, tmp_path):
    disk = {"write_GBps": 2.0, "read_GBps": 3.0}
    weak, strong, quick = host("weak", cores=4), host("strong"), host("quick", disk=disk)
    found = built(sources, document(), document("gpu-2"), weak, strong, quick, host("alone", site="nowhere"))
    assert [(each.region, each.cores, each.machines) for each in found.problem.hosts] == [
        ("here", 16, ("quick", "strong")),
        ("here", 4, ("weak",)),
    ]
    assert any("alone" in note and "left out" in note for note in found.notes)
    write_problem(tmp_path / "problem.yaml", found)
    result = penstock_in_process("plan", "problem.yaml", "--budget-s", "1", "--json", cwd=tmp_path)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)["rm1_plan"]
    assert (plan["broker"]["node"], plan["scheduler"]) == ("quick", "quick")
    (line,) = refusal(replace(sources, inventory=tmp_path / "hosts"), host("a"), host("b"))
    assert "all 2 machines are hosts" in line


def test_rewards_are_planned_as_they_were_measured_and_asked_for_otherwise(sources, tmp_path):
    run = tmp_path / "run.yaml"

    def with_reward(model, *documents, rate=None):
        run.write_text(
            yaml.safe_dump(
                {
                    "run": {"num_steps": 3},
                    "model": {"path": str(sources.model)},
                    "data": {"train": str(write_rows(tmp_path / "train.jsonl")), "max_prompt_tokens": 64},
                    "reward": {"model": model, "judge": {"url": "http://j/v1", "model": "m"}},
                }
            )
        )
        return replace(sources, run=run, reward_rate=rate), *documents

    fast, slow, same = (reward(rate) for rate in (200, 50, 100))
    first, second, third = two_sites()
    measured = {**first, "reward": slow}, {**second, "reward": fast}, {**third, "reward": same}
    work = built(*with_reward("code", *measured)).problem.workload.reward
    assert work.memory_GB == 1.5
    assert work.samples_per_second("A100-80") == pytest.approx(125)
    assert work.samples_per_second("L4") == pytest.approx(100)
    assert built(*with_reward("code", first, second, third, rate=7)).problem.workload.reward.samples_per_second(
        "L4"
    ) == pytest.approx(7)
    for model, said in (
        ("math", "probes measured code and not math"),
        ("judge", "the rate of judge is its endpoint's"),
    ):
        (line,) = refusal(*with_reward(model, *measured))
        assert line.startswith("workload.reward.seconds_per_sample: ")
        assert said in line
        assert "--reward-rate" in line
    cpus = {"type": "cpu", "kind": "EPYC, 2 cores", "count": 2, "memory_GB": 8.0}
    (line,) = refusal(replace(*with_reward("exact_match"), inventory=tmp_path / "cpus"), document(accelerators=cpus))
    assert line == "trainer.device: auto, and all probed devices are CPUs; set it to cpu in the run"
    # Rules that take microseconds are not asked for.
    assert built(*with_reward("exact_match", first, second, third)).problem.workload.reward is None
    answered = {**third, "reward": reward(completions="answers")}
    assert any("answers in place of completions" in note for note in built(*with_reward("code", answered, first)).notes)
