"""Writes a heterogeneous Slurm job: a component for the head, and one for each site's machines of a kind.

No containers: each machine starts `penstock` from a shared folder. One component that ends ends the others; the whole
job is queued again, and the run goes on from its newest checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from console.deploy.description import Deployment, Files, Host
from console.deploy.engines.machine_script import SECRETS_FOLDER, machine_script
from console.deploy.trainers import MAX_RESTARTS
from penstock.process.grace_periods import STOP_GRACE_S

_MARGIN_S = 60.0
_TIME_LIMIT = "24:00:00"

_STEPS = """# Starting

The problem's machines (`name-0`, ...) are nodes of the cluster, and this folder is on a file system that all of them
see, as are model, data and the run's folder. Fill in `settings.env`: how `penstock` is found, {secrets}. Then, in this
folder:

```
./submit.sh                # compares the machines with the cluster's nodes, then queues the job
tail -f job.log
scancel JOB                # ends it after a checkpoint; it is not queued again
```

`job.sh` is one heterogeneous job; set its time limit, partitions and accounts there. {margin:.0f} s before the limit,
and when it is preempted, all services write what they hold and end, and the job is queued again (at most {restarts}
times); so it is when a component ends. When the run is complete the job ends with status 0.
"""
_SETTINGS = """# Read by every machine of the job, with bash.
# export PATH="/shared/penstock/.venv/bin:$PATH"
{secrets}# Secrets (docs/operating.md); those left out are off. Keep this file private: chmod 600.
# export PENSTOCK_TOKEN_FILE=
# export OTEL_EXPORTER_OTLP_HEADERS=
"""
_CERTIFICATES = """# The folder `certificates`: its MACHINE/{ca,cert,key}.pem are the certificate of each machine.
export PENSTOCK_SECRETS=
"""
_SUBMIT = r"""#!/bin/bash
# Queues the job if the cluster has the machines that the plan counts on: name, and GPUs of each.
set -eu
cd "$(dirname "$0")"
missing=0
expect() {
    found=$(sinfo --noheader --Node --nodes="$1" --format=%G 2>/dev/null | head -n 1)
    if [ -z "$found" ]; then
        echo "penstock: $1: is no node of this cluster (sinfo -N); name the machines of the problem after its nodes" >&2
        missing=1
        return
    fi
    # Such as gpu:h100:8(S:0-1),shard:16
    gpus=$(tr , '\n' <<<"$found" | awk -F: '/^gpu:/ { sub(/\(.*/, ""); sum += $NF } END { print sum + 0 }')
    if [ "$gpus" -lt "$2" ]; then
        echo "penstock: $1: has $gpus GPUs by its Gres ($found), and the plan uses $2; correct \`nodes\` in the" \
            "problem and plan again" >&2
        missing=1
    fi
}
"""
_JOB = r"""
# Components, the head's first: each is a step of its own.
cd "${SLURM_SUBMIT_DIR:?start this by submit.sh}" || exit 2
say() { echo "penstock: $*" >&2; }
if ! srun --het-group=@ALL@ --kill-on-bad-exit=0 ./machine.sh check; then
    say "nothing was started: mend what the lines above name, then ./submit.sh again"
    exit 2
fi

reason=
# The first one counts: the time limit may come near while steps end for another.
trap ': "${reason:=the time limit is near, or the job is preempted}"' USR1
trap ': "${reason:=the job is asked to end}"' TERM
steps=()
for component in "${!names[@]}"; do
    # One task has the whole machine, not the core that it counts as.
    srun --het-group="$component" --kill-on-bad-exit=1 --cpu-bind=none ./machine.sh start &
    steps+=($!)
done
wait -n "${steps[@]}"
status=$?
if [ -z "$reason" ]; then
    for component in "${!names[@]}"; do kill -0 "${steps[component]}" 2>/dev/null || break; done
    reason="component $component (${names[component]}) ended with status $status"
    case $component/$status in
    0/0) reason="the run is complete" ;;
    */2) reason="$reason, a wrong configuration" ;;
    esac
fi
# To the steps alone. SIGTERM of srun would leave them KillWait, which is less than a checkpoint may take.
scancel --signal=TERM "$SLURM_JOB_ID"
# A trap ends a wait early.
for step in "${steps[@]}"; do while kill -0 "$step" 2>/dev/null; do wait "$step"; done; done

case $reason in
"the run is complete") say "$reason"; exit 0 ;;
*"a wrong configuration") say "$reason: see the lines above"; exit 2 ;;
esac
state=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep -o 'JobState=[A-Z_]*' | head -n 1)
if [ "$state" != JobState=RUNNING ]; then
    say "$reason; Slurm itself ends it (${state:-no state})"
elif [ "${SLURM_RESTART_COUNT:-0}" -ge @RESTARTS@ ]; then
    say "$reason; given up after @RESTARTS@ restarts: ./submit.sh continues the run"
else
    say "$reason; the job is queued again and the run resumed"
    scontrol requeue "$SLURM_JOB_ID" && sleep infinity
fi
exit 1
"""


def slurm_files(deployment: Deployment) -> Files:
    """The job, what submits it, and what its machines start."""
    folder = f", and `{SECRETS_FOLDER}`, the folder `certificates`" if deployment.has_certificates else ""
    margin_s = STOP_GRACE_S["run"] + _MARGIN_S
    return {
        "README.md": _STEPS.format(secrets=f"tokens if you use them{folder}", margin=margin_s, restarts=MAX_RESTARTS),
        "settings.env": _SETTINGS.format(secrets=_CERTIFICATES if deployment.has_certificates else ""),
        "submit.sh": _submit(deployment),
        "job.sh": _job(deployment, margin_s),
        "machine.sh": machine_script(deployment, deployment.hosts, name_variable="SLURMD_NODENAME", is_at_site=False),
    }


def _components(deployment: Deployment) -> list[list[Host]]:
    """The head alone, since it tells when the run ends, then each site's machines of a kind."""
    groups: dict[tuple[str, str], list[Host]] = {}
    for host in deployment.hosts[1:]:
        groups.setdefault((host.site, host.kind.name), []).append(host)
    return [[deployment.head], *groups.values()]


def _submit(deployment: Deployment) -> str:
    expected = "".join(f"expect {shlex.quote(host.name)} {host.gpus}\n" for host in deployment.hosts)
    return f'{_SUBMIT}{expected}[ "$missing" = 0 ] || exit 2\nexec sbatch "$@" job.sh\n'


def _job(deployment: Deployment, margin_s: float) -> str:
    common = [
        f"--job-name=penstock-{deployment.run_id}",
        "--output=job.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{margin_s:.0f}",
        f"--time={_TIME_LIMIT}",
    ]
    parts = [[*(common if index == 0 else common[-1:]), *_sizes(hosts)] for index, hosts in _numbered(deployment)]
    options = "#SBATCH hetjob\n".join("".join(f"#SBATCH {option}\n" for option in part) for part in parts)
    names = [f"{hosts[0].site}: {', '.join(host.name for host in hosts)}" for _, hosts in _numbered(deployment)]
    quoted = " ".join(map(shlex.quote, names))
    everyone = ",".join(str(index) for index, _ in _numbered(deployment))
    body = _JOB.replace("@ALL@", everyone).replace("@RESTARTS@", str(MAX_RESTARTS))
    return f"#!/bin/bash\n{options}names=({quoted})\n{body}"


def _numbered(deployment: Deployment) -> list[tuple[int, list[Host]]]:
    return list(enumerate(_components(deployment)))


def _sizes(hosts: Sequence[Host]) -> list[str]:
    """Whole machines: the plan's GPUs are numbered as the machine numbers them."""
    gpus = max(host.gpus for host in hosts)
    return [
        f"--nodelist={','.join(host.name for host in hosts)}",
        f"--nodes={len(hosts)}",
        "--ntasks-per-node=1",
        "--exclusive",
        "--mem=0",
        *([f"--gres=gpu:{max(host.all_gpus for host in hosts)}"] if gpus else []),
    ]
