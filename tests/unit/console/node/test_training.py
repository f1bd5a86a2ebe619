"""The trainer of a machine by a plan, and what the run's console makes of the training pool."""

import pytest
from google.protobuf.json_format import MessageToJson

from console.config.config import parse_run_config
from console.node.config import NodeConfig
from console.node.training import missing_run, obstacle, trainer_config, training_place
from console.run.run_plan import newest_plan, processes, trainer_settings
from penstock.config import ConfigError
from penstock.v1 import scheduler_pb2 as pb
from services.scheduler.planning.plan_message import document_of
from services.scheduler.replanning.trainer_move import is_moved
from tests.helpers.console import document


def config(folder, *, trains=True):
    generator = {"run_id": "r", "model_path": "/m", "cache_dir": "/c"}
    trainer = {"listen": "0.0.0.0:7304", "run_dir": str(folder / "runs" / "r"), "allowed_roots": [str(folder)]}
    machine = {"node_id": "a", "gpu": "H800", "gpus": 2, "scheduler": "s:1", "dir": "/d", "generator": generator}
    return NodeConfig.model_validate({**machine, **({"trainer": trainer} if trains else {})})


def plan(**pool):
    """A plan that trains on that many GPUs of each machine, which are all alike."""
    made, num_gpus = pb.Plan(run_id="r"), sum(pool.values())
    for name, gpus in pool.items():
        made.assignments.add(node_id=name, role=pb.ROLE_TRAINER, accelerator_indices=range(gpus), share=gpus / num_gpus)
    return made


def test_a_machine_trains_where_the_plan_has_it_and_its_file_says_how(tmp_path):
    place = training_place(plan(a=2), config(tmp_path))
    assert place is not None
    assert (place.gpus, place.machines) == ((0, 1), (("a", 2),))
    assert training_place(plan(a=1), config(tmp_path)) != place
    assert training_place(plan(b=2), config(tmp_path)) is None
    assert training_place(plan(a=2), config(tmp_path, trains=False)) is None
    assert trainer_config(config(tmp_path)).state_dir is None


def test_gpus_that_the_machine_does_not_have_do_not_train(tmp_path):
    assert training_place(plan(a=3), config(tmp_path)) is None
    assert "the plan trains on GPUs 0, 1, 2; there are 2" in obstacle(plan(a=3), config(tmp_path))
    assert obstacle(plan(a=3), config(tmp_path, trains=False)) == ""


def test_a_machine_that_does_not_see_the_run_says_so_until_it_does(tmp_path):
    assert "trainer.run_dir: " in missing_run(config(tmp_path))
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "config.yaml").touch()
    assert missing_run(config(tmp_path)) == ""
    assert missing_run(config(tmp_path / "elsewhere", trains=False)) == ""


def test_a_machine_with_the_runs_storage_needs_no_folder_of_it(tmp_path):
    stated = config(tmp_path / "elsewhere")
    trainer = stated.trainer.model_copy(update={"checkpoint_storage": "s3://team/runs"})
    apart = stated.model_copy(update={"trainer": trainer})
    assert missing_run(apart) == ""
    settings = trainer_config(apart)
    assert (settings.runs_dir, settings.allowed_storage) == (tmp_path / "elsewhere" / "runs", ("s3://team/runs",))
    assert trainer_config(stated).runs_dir is None


def test_a_trainer_takes_the_mesh_of_the_plan_and_another_mesh_is_another_place(tmp_path):
    one_copy, staged = plan(a=2), plan(a=2)
    staged.trainer_islands.extend([2])
    staged.assignments[0].pipeline_parallel = 2
    assert trainer_settings(one_copy) == {"processes": 2, "parallel": {}}
    assert trainer_settings(staged) == {"processes": 2, "parallel": {"replicate": 1, "shard": 1, "pipeline": 2}}
    assert training_place(staged, config(tmp_path)) != training_place(one_copy, config(tmp_path))
    before, after = document_of(one_copy), document_of(staged)
    assert is_moved(before, after)
    assert not is_moved(after, after)


def test_there_is_a_process_for_each_gpu_with_its_share_of_tokens_where_gpus_differ():
    assert processes(plan(a=2, b=1)) == 3
    unlike = plan(a=2, b=1)
    unlike.assignments[0].share, unlike.assignments[1].share = 0.5, 0.5
    assert processes(unlike) == (0.5, 0.5, 1.0)
    for each in unlike.assignments:
        each.share = 0.0
    assert processes(unlike) == 3, "a plan that states no shares"


def test_a_trainer_moves_between_several_addresses_by_a_plan_only(tmp_path):
    stated = {**document(tmp_path), "endpoints": {"trainer": ["a:7304", "b:7304"]}}
    with pytest.raises(ConfigError, match=r"endpoints.trainer: a:7304,b:7304 are several addresses"):
        parse_run_config(stated, source="c")
    stated["scheduler"] = {"problem": "problem.json"}
    assert parse_run_config(stated, source="c").moves_trainer
    stated["trainer"] = {"processes": 2, "parallel": {"replicate": 2}}
    with pytest.raises(ConfigError, match=r"trainer.parallel: the plan sets the trainer's mesh"):
        parse_run_config(stated, source="c")


def test_machines_of_a_pool_have_the_ranks_in_its_order(tmp_path):
    place = training_place(plan(b=1, a=2), config(tmp_path))
    assert place is not None
    assert (place.num_ranks, place.ranks("b"), place.ranks("a")) == (3, range(1), range(1, 3))


def test_a_resumed_run_begins_with_the_plan_that_it_followed_last(tmp_path):
    history = tmp_path / "plans.jsonl"
    assert newest_plan(history) is None
    history.write_text("".join(MessageToJson(made, indent=None) + "\n" for made in (plan(a=1), plan(b=2))))
    assert newest_plan(history) == plan(b=2)
    history.write_text("{cut")
    assert newest_plan(history) is None
