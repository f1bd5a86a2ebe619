"""Measures the services; docs/benchmarks.md says what each benchmark measures, and its results.

`penstock bench NAME` runs `main` of the module `benchmarks.NAME`, or of its `__main__` if that is a folder. A suite
owns its options, its targets and its table, and may drive other systems for comparison. Only tests import this package,
and it is not installed.
"""

SUITES = {
    "broker": "throughput, latency and memory of a broker, and its token streams",
    "broker.chunks": "CPU time of token chunks, by their size and number",
    "broker.large_groups": "memory that one very large group takes",
    "broker.leases": "CPU time of a lease at the start of a step, by size of the fleet",
    "broker.memory": "a broker's memory under a large fleet",
    "broker.overload": "a broker with more tokens than it can carry",
    "broker.reload": "a restarted broker that loads a large run",
    "broker.restart": "how soon a broker over a very large run answers again",
    "broker.retained": "what Redis keeps of trained steps, bytes a token",
    "dispatch": "dispatch policies on simulated fleets",
    "dispatch.depth": "dispatch decisions with a long queue",
    "e2e": "a whole run next to TRL and to the ideal overlap",
    "e2e.mutual_tls": "a run under mutual TLS and in plain text",
    "fleet": "dispatch over emulated GPUs through real services",
    "generator": "in-flight updates and concurrency of a vLLM engine",
    "gpu": "everything that needs a GPU, as one page (make gpu-check)",
    "placement": "sessions of several turns where their prefix is cached, next to the least loaded generator",
    "ranker": "forecasts of completion lengths",
    "reward.scores": "scores a second through broker, Redis and a reward worker",
    "scale": "unit costs of a broker under a thousand generators, and what fleets need",
    "scale.churn": "what grows in a broker and in Redis within an hour of a run",
    "scheduler.calibration": "the cost models next to published measurements",
    "scheduler.deployed": "a deployed plan next to its prediction",
    "scheduler.instances": "plans and simulations of given problems",
    "scheduler.results": "the papers' comparisons, for docs/results.md",
    "scheduler.validation": "the simulators next to real services",
    "size": "a run at the size of Qwen3-0.6B end to end: memory, times, bytes",
    "tools": "a generator whose samples wait for slow tools, next to none",
    "trainer.bare_publication": "bare processes that copy, write and digest the bytes of a version",
    "trainer.convergence": "learning from samples of a stated age",
    "trainer.logits": "memory and time of the log-probs of long samples",
    "trainer.memory": "memory of each process of a trainer",
    "trainer.traffic": "bytes between the processes of a trainer",
    "trainer.publication": "publishing next to bare processes that write and digest the same bytes",
    "trainer.throughput": "the trainer's step next to a bare PyTorch loop",
    "turns": "learning over turns: credit by turns next to credit by samples",
    "weights": "publishing, fetching and installing weights",
    "weights.broadcast": "a gloo broadcast of weights next to HTTP",
    "weights.delta": "size and time of a delta between two versions",
}
"""Each suite's name and what it measures, as `penstock bench --help` lists them."""
