"""Defines `penstock probe`, `plan`, `simulate` and `node`: names, options and help. Imports little until one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from console.subcommands.cli_common import (
    CostModel,
    Json,
    NoticeFile,
    NoticeUrl,
    PlanJson,
    Problem,
    command,
    end_by_sigterm,
)
from services.scheduler.solvers.registry import AUTO, SOLVERS

app = typer.Typer()

Start = Annotated[Path | None, typer.Option("--start", metavar="PLAN", help="Initial plan, such as the running one.")]
Picture = Annotated[
    Path | None, typer.Option("--picture", metavar="FILE.svg", help="Draw placement and timeline into a file.")
]
DeployFolder = Annotated[
    Path | None, typer.Option("--deploy", metavar="DIR", help="Write files that start the plan, and configurations.")
]
DeployEngine = Annotated[
    str, typer.Option("--for", metavar="ENGINE", help="With --deploy: compose, slurm, kubernetes or skypilot.")
]
DeployAddress = Annotated[
    str | None, typer.Option("--address", help="With --deploy: address of all machines, to try the plan on one.")
]
DeployHead = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="HOST",
        help="With --deploy: where other sites reach the head; HEAD,BROKER if the broker is on another machine.",
    ),
]
MovesTrainer = Annotated[
    bool, typer.Option("--moves-trainer", help="With --deploy: revisions may move the trainer to any machine.")
]
PlannedRun = Annotated[
    Path | None,
    typer.Option("--run", metavar="RUN.yaml", help="The run: its model, data and settings, to plan and to deploy."),
]
Inventory = Annotated[
    Path | None, typer.Option("--inventory", metavar="DIR", help="Build the problem: files of `penstock probe`.")
]
PlannedModel = Annotated[
    Path | None, typer.Option("--model", metavar="HF_DIR", help="With --inventory: the model to train.")
]
PlannedData = Annotated[
    Path | None, typer.Option("--data", metavar="FILE", help="With --inventory: a recording, or rows of prompts.")
]
SearchBudget = Annotated[
    float | None,
    typer.Option(
        "--budget-s", min=0.1, max=86_400, help="Time to search, seconds: by default 14 for 64 GPUs, 45 for 1,024."
    ),
]
CompletionTokens = Annotated[
    int | None, typer.Option("--completion-tokens", min=1, help="With --inventory: length of completions.")
]
PromptsPerStep = Annotated[
    int | None, typer.Option("--prompts-per-step", min=1, help="With --inventory: prompts of a training step.")
]
GroupSize = Annotated[int | None, typer.Option("--group-size", min=1, help="With --inventory: samples of each prompt.")]
Staleness = Annotated[
    int | None, typer.Option("--staleness", min=0, help="With --inventory: versions that a sample may lag.")
]
RewardRate = Annotated[
    float | None,
    typer.Option("--reward-rate", min=1e-6, help="With --inventory: samples/s that one reward worker scores."),
]
WriteProblem = Annotated[
    Path | None, typer.Option("--write-problem", metavar="FILE", help="With --inventory: write the problem, YAML.")
]


@command(app)
def probe(  # noqa: PLR0913, PLR0917 - a command's options are its signature
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write NAME.json into.")] = Path(
        "inventory"
    ),
    name: Annotated[
        str | None, typer.Option("--name", metavar="MACHINE", help="Name at which others reach it; default: host name.")
    ] = None,
    site: Annotated[str, typer.Option("--site", help="Machines of one site share a fast network.")] = "default",
    model: Annotated[
        Path | None, typer.Option("--model", metavar="HF_DIR", help="Decode with this model, not a small one.")
    ] = None,
    peers: Annotated[
        list[str] | None, typer.Option("--with", metavar="HOST:PORT", help="Measure the network to a machine.")
    ] = None,
    listen: Annotated[
        str | None, typer.Option("--listen", metavar="HOST:PORT", help="Answer --with of others; measure nothing.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", metavar="WHAT", help="Leave out allreduce, passes, disk or decode.")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.05, max=5, help="Length of each measurement except decode.")
    ] = 3.0,
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            "--cpu-devices", min=1, max=1024, help="Without GPUs: count the CPUs as that many devices; else a host."
        ),
    ] = None,
    reward: Annotated[
        Path | None, typer.Option("--reward", metavar="RUN.yaml", help="Measure how fast a run's reward scores here.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="FILE", help="With --reward: a recording to score, not rows' answers."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Measure what a plan needs to know of this machine, in under three minutes, and write it into one small file.

    Measured are: matrix rate in bfloat16, memory bandwidth, all-reduce, decode steps by batch, disk, a run's reward,
    and the network to machines that listen; on a machine without GPUs, a host for broker, Redis and scheduler, the
    last three. Exit status 1 if a measurement failed; the file says which.

    Examples:
      penstock probe --out inventory --site frankfurt
      penstock probe --listen 0.0.0.0:7309 --site frankfurt
      penstock probe --out inventory --site oslo --with gpu-1.frankfurt.example:7309
      penstock probe --out inventory --site frankfurt --reward my.yaml --data trajectories.jsonl
      penstock probe --cpu-devices 2 --skip decode --json
    """
    from console.probe.measurements import ProbeOptions
    from console.probe.probe_command import listen_command, probe_command

    end_by_sigterm()
    options = ProbeOptions(
        out=out,
        name=name,
        site=site,
        model=model,
        peers=peers or [],
        skip=skip or [],
        seconds=seconds,
        cpu_devices=cpu_devices,
        reward=reward,
        data=data,
    )
    return probe_command(options, is_json=as_json) if listen is None else listen_command(listen, options)


@command(app)
def plan(  # noqa: PLR0913, PLR0917 - a command's options are its signature
    problem: Annotated[
        Path | None,
        typer.Argument(metavar="[PROBLEM]", help="Cluster, model and workload: .yaml or .json; or use --inventory."),
    ] = None,
    solver: Annotated[str, typer.Option("--solver", help=f"One of {', '.join(SOLVERS)}.")] = AUTO,
    cost_model: CostModel = "rm1",
    budget_s: SearchBudget = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the search.")] = 0,
    json_output: PlanJson = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show how the time is spent, and every offer.")] = False,
    start: Start = None,
    picture: Picture = None,
    deploy: DeployFolder = None,
    engine: DeployEngine = "compose",
    run: PlannedRun = None,
    address: DeployAddress = None,
    head: DeployHead = None,
    moves_trainer: MovesTrainer = False,
    inventory: Inventory = None,
    model: PlannedModel = None,
    data: PlannedData = None,
    completion_tokens: CompletionTokens = None,
    prompts_per_step: PromptsPerStep = None,
    group_size: GroupSize = None,
    staleness: Staleness = None,
    reward_rate: RewardRate = None,
    write_problem: WriteProblem = None,
) -> int:
    """Plan which machines of a mixed cluster generate and which train, and show the expected throughput.

    Nothing is started. Exit status 1 if no plan can run; the reason is printed.

    Examples:
      penstock plan examples/two_sites.yaml
      penstock plan examples/two_sites.yaml --solver exhaustive --json
      penstock plan examples/two_sites.yaml --explain --picture plan.svg
      penstock plan examples/two_sites.yaml --deploy out --for slurm --run RUN.yaml
      penstock plan --inventory inventory --model models/qwen --data trajectories.jsonl --run my.yaml
      penstock plan --inventory inventory --run my.yaml --completion-tokens 900 --write-problem problem.yaml
    """
    from console.plan.build_problem import Sources
    from console.plan.picture_file import check_picture
    from console.plan.plan_command import Deployment, plan_problem, show, stated_problem, write_files

    check_picture(picture)
    sources = Sources(
        inventory=inventory,
        model=model,
        data=data,
        run=run,
        completion_tokens=completion_tokens,
        prompts_per_step=prompts_per_step,
        group_size=group_size,
        staleness=staleness,
        reward_rate=reward_rate,
        write_problem=write_problem,
    )
    report = plan_problem(
        stated_problem(problem, sources),
        solver=solver,
        cost_model=cost_model,
        budget_s=budget_s,
        seed=seed,
        start=start,
        is_deployed=deploy is not None,
    )
    deployment = Deployment(
        folder=deploy, engine=engine, run=run, address=address, head_address=head, moves_trainer=moves_trainer
    )
    write_files(report, picture=picture, deployment=deployment)
    return show(report, is_json=json_output, is_explained=explain)


@command(app)
def simulate(  # noqa: PLR0913, PLR0917 - one argument for each option
    problem: Problem,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan, or the output of `plan --json`. Default: a new plan.")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="colocated_sync, disaggregated_sync, streaming, one_step or async.")
    ] = "async",
    cost_model: CostModel = "calibrated",
    steps: Annotated[int, typer.Option("--steps", min=2, max=100_000, help="Training steps.")] = 10,
    growth: Annotated[
        float, typer.Option("--growth", min=0, max=10, help="Growth of lengths per step, as a share of the first ones.")
    ] = 0.0,
    fail: Annotated[
        list[str] | None, typer.Option("--fail", metavar="MACHINE@S", help="A machine fails at second S.")
    ] = None,
    join: Annotated[
        list[str] | None, typer.Option("--join", metavar="MACHINE@S", help="A machine joins at second S.")
    ] = None,
    slow: Annotated[
        list[str] | None,
        typer.Option("--slow", metavar="MACHINE@S:FACTOR", help="From second S a machine takes FACTOR times as long."),
    ] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write the timeline to this SVG file.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, max=1_000_000, help="Seed of the lengths drawn.")] = 0,
    json_output: PlanJson = False,
) -> int:
    """Simulate a plan event by event on a virtual clock: samples generated, trained and lost, and waiting times.

    Nothing is started. The broker's own rules admit and batch; the scheduler's cost model supplies the durations.

    Examples:
      penstock simulate examples/two_sites.yaml
      penstock simulate examples/two_sites.yaml --mode streaming --picture timeline.svg
      penstock simulate examples/two_sites.yaml --fail l40s-1@200 --slow l40s-0@100:2
    """
    from console.plan.simulate_command import change_of, mode_of, simulate_command
    from simulator.virtual_run.event_loop import Options

    named = (("fail", fail), ("join", join), ("slow", slow))
    options = Options(
        mode=mode_of(mode),
        num_steps=steps,
        skip=min(2, steps - 1),
        seed=seed,
        growth_per_step=growth,
        changes=[change_of(text, kind) for kind, texts in named for text in texts or ()],
    )
    return simulate_command(
        problem, options, plan_path=plan, cost_model=cost_model, picture=picture, is_json=json_output
    )


@command(app)
def node(
    config: Annotated[Path, typer.Argument(metavar="NODE.yaml", help="The machine; `plan --deploy` writes it.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[KEY.SUBKEY=VALUE]...", help="Settings.")] = None,
    notice_file: NoticeFile = None,
    notice_url: NoticeUrl = None,
) -> int:
    """Offer this machine to a run: start and stop the generators that its plan assigns to it, until SIGTERM or Ctrl-C.

    Exit status 1 if a generator could not be kept running; the machine is then removed from the plan. Exit status 2
    if the configuration is wrong, or the scheduler refuses the token.

    Examples:
      penstock node out/r0/node-h20-0.yaml
      penstock node out/r0/node-h20-0.yaml node_id=h20-new
      penstock node out/r0/node-h20-0.yaml --notice-url aws
    """
    from console.node.node import node_command
    from penstock.notices.watch import NoticeSources

    notices = NoticeSources(file=notice_file, url=notice_url)
    return node_command(config, overrides or [], notices=notices)
