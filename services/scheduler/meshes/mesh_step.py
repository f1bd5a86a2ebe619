"""Computes a training step of a mesh: what Penstock's trainer computes, gathers, passes on and adds up in it.

- *Islands* train at once, on tokens by their shares. Each gathers its weights for every pass and adds its gradients up
  after it (`penstock.model.training_traffic`), hidden by a share of the computation. Once a step, when it is over,
  every island sends its gradients in float32 to every other one.
- *Tensor*: neighbours have their packs together, and wait for two sums of hidden states a layer and direction.
- *Pipeline*: a pack passes the stages in microbatches of whole samples, at most four for each stage, all forwards and
  then all backwards (GPipe, arXiv 1811.06965): with m of them the first takes the sum over stages, and each further
  one the time of the slowest. Hidden states travel in float32; the weights of a stage are gathered once a pack.
- *Experts*: neighbours with packs of their own wait in each layer for tokens and answers (`expert_exchange`). No
  other process gathers these experts.
- *Offload*: shards go up as they are gathered, gradients back, and the machines take the step (`offload`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from penstock.model.decoder_shape import ModelShape
from penstock.model.training_memory import TrainingMode
from penstock.model.training_traffic import exchanged_bytes, gathered_bytes, reduced_bytes
from services.scheduler.cost_model.demand import Demand
from services.scheduler.cost_model.network import Network
from services.scheduler.cost_model.pool_memory import model_shape
from services.scheduler.cost_model.training_step import TrainingStep, gpu_samples_per_second
from services.scheduler.meshes.expert_exchange import exchange_s
from services.scheduler.meshes.islands import Island, Part, size_of
from services.scheduler.meshes.layer_division import Passage, StageCost
from services.scheduler.meshes.mesh_memory import layers_of
from services.scheduler.meshes.offload import moved_s, optimizer_s
from services.scheduler.problem.mesh import Mesh
from services.scheduler.problem.problem import Problem

MICROBATCHES_PER_STAGE = 4
"""At most, of a pack: the trainer's."""
_MASTER_BYTES = 4
"""Of hidden states between stages, and of gradients between islands."""
_HALF_BYTES = 2
"""Of what split layers add up."""
_ONE_COPY = Mesh()


@dataclass(frozen=True, slots=True)
class _Work:
    """What one process, or those that have their packs together, spend in a step."""

    compute_s: float
    hidden_s: float
    """Exchanges that a share of the computation hides."""


class MeshSteps:
    """The steps of one problem, which states `train_pack_tokens`."""

    def __init__(self, problem: Problem, demand: Demand, network: Network) -> None:
        self._problem, self._demand, self._network = problem, demand, network
        self._shape = model_shape(problem)
        self._pack_tokens = problem.cost_model.train_pack_tokens
        self.rates = {node.name: gpu_samples_per_second(problem, demand, node) for node in problem.nodes}
        """Samples per second of one GPU, by node entry."""
        tasks = problem.workload.pool_tasks
        self._trained = sum(task.scale for task in tasks if task.kind == "train")
        """Size of all that is trained, in copies of the model."""
        self._num_passes = sum(task.scale * task.epochs for task in tasks if task.kind == "train")
        self._num_scoring = sum(task.scale * task.epochs for task in tasks if task.kind == "infer")
        forward = sum(flops / (3 if kind == "train" else 1) for kind, flops in demand.task_flops)
        output = 2.0 * self._shape.embedding_params * demand.trained_tokens * (self._num_passes + self._num_scoring)
        self.output_share = min(0.9, output / forward)
        """Of the computation, what the output layer takes."""

    @property
    def num_layers(self) -> int:
        """Of the model."""
        return self._shape.num_layers

    def ideal_s(self, pool: Sequence[Part]) -> float:
        """A step of these GPUs that compute all the time; no mesh takes less."""
        rate = sum(part.gpus * self.rates[part.node.name] for part in pool)
        return self._demand.samples_per_step / rate + self._problem.cost_model.train_overhead_s

    def least_pipeline_s(self, pool: Sequence[Part], num_stages: int) -> float:
        """Less than any step of these GPUs in pipelines of that many stages: balanced, and without a network.

        Of a pack's rounds all but the first take as long as balanced stages, the first no less than on the fastest
        GPUs alone.
        """
        num_processes = size_of(pool)
        samples = self._demand.samples_per_step * num_stages / num_processes
        rounds = self.microbatches(samples / self.passes(samples), num_stages)
        rates = [self.rates[part.node.name] for part in pool]
        total = sum(part.gpus * rate for part, rate in zip(pool, rates, strict=True))
        first = num_stages * total / num_processes / max(rates)
        ideal_s = self._demand.samples_per_step / total
        return ideal_s * (rounds - 1 + first) / rounds + self._problem.cost_model.train_overhead_s

    def island_speed(self, run: Sequence[Part]) -> float:
        """Samples per second of GPUs that shard a copy, with tokens by speed."""
        rates = [self.rates[part.node.name] for part in run]
        total = sum(part.gpus * rate for part, rate in zip(run, rates, strict=True))
        pass_s = self.pass_s(run, size_of(run)) * self._demand.trained_tokens / self._pack_tokens
        hidden_s = pass_s * max(rates) / total
        return 1 / (1 / total + max(0.0, hidden_s - self._problem.cost_model.dp_overlap / total))

    def step(self, islands: Sequence[Island], mesh: Mesh) -> TrainingStep:
        """A step of this mesh with the shares of its parts."""
        shares = sum(part.gpus * part.share for island in islands for stage in island for part in stage)
        samples = self._demand.samples_per_step / shares
        # Equal islands pass at once what crosses the link of two regions.
        alike = len(islands) if mesh.is_uniform else 1
        works = [work for island in islands for work in self._works(island, mesh, samples, alike)]
        overlap = self._problem.cost_model.dp_overlap
        slowest = max(works, key=lambda work: _exposed(work, overlap) + work.compute_s)
        summed_s = self._summed_s(islands, mesh)
        overhead_s = self._problem.cost_model.train_overhead_s
        if mesh.offload:
            overhead_s += optimizer_s(self._problem, islands, num_params=self._shape.num_params * self._trained)
        return TrainingStep(
            compute_s=slowest.compute_s,
            allreduce_s=slowest.hidden_s + summed_s,
            exposed_allreduce_s=_exposed(slowest, overlap) + summed_s,
            overhead_s=overhead_s,
        )

    def _works(self, island: Island, mesh: Mesh, samples: float, alike: int) -> list[_Work]:
        """Of one of that many equal islands; `samples` is what a share of 1 stands for."""
        if mesh.pipeline > 1:
            return [self._pipeline(island, mesh, samples, alike)]
        (parts,) = island
        num_shards = size_of(parts) // mesh.tensor
        # All take part in as many passes as the one with the most tokens.
        passes = self.passes(samples * mesh.tensor * max(part.share for part in parts))
        hidden_s = passes * self.pass_s(parts, num_shards, mesh, alike=alike)
        waits_s = self._expert_s(parts, samples * max(part.share for part in parts), mesh)
        return [
            _Work(
                samples * part.share * (1 / self.rates[part.node.name] + mesh.tensor * self.split_s(part, mesh.tensor))
                + waits_s,
                hidden_s,
            )
            for part in parts
        ]

    def _expert_s(self, parts: Sequence[Part], samples: float, mesh: Mesh) -> float:
        """What an island exchanges for experts, the process with that many samples setting the pace."""
        if mesh.expert == 1:
            return 0.0
        mode = self._mode(size_of(parts), mesh)
        tokens = samples * self._demand.trained_tokens
        sent = exchanged_bytes(
            self._shape, mode, num_tokens=tokens * self._num_passes, num_scoring_tokens=tokens * self._num_scoring
        )
        return exchange_s(self._problem.gpu_types, self._network, parts, num_expert_shards=mesh.expert, sent=sent)

    def _mode(self, num_shards: int, mesh: Mesh) -> TrainingMode:
        return TrainingMode(
            num_shards=num_shards, pack_tokens=self._pack_tokens, is_half=True, num_expert_shards=mesh.expert
        )

    def passes(self, samples: float) -> int:
        """Packs of that many samples."""
        return max(1, math.ceil(samples * self._demand.trained_tokens / self._pack_tokens * (1 - 1e-9)))

    def pass_s(self, parts: Sequence[Part], num_shards: int, mesh: Mesh = _ONE_COPY, *, alike: int = 1) -> float:
        """What those that shard a copy exchange for a pack: weights for both passes, and gradients."""
        if num_shards == 1:
            return 0.0
        moved = 0.0
        if mesh.offload:
            shard, passes = self._shape.num_params / num_shards, (self._num_passes, self._num_scoring)
            moved = moved_s(self._problem, num_params=shard, num_passes=passes[0], num_scoring=passes[1])
        shape, mode = self._shape.split(mesh.tensor), self._mode(num_shards, mesh)
        all_bytes = self._shared_bytes(shape, mode)
        if mesh.expert == 1:
            # On one network card, those that split layers gather side by side.
            sent = (num_shards - 1) / num_shards * all_bytes
            return moved + self._sent_s(parts, sent, at_card=mesh.tensor, at_link=mesh.tensor * alike)
        # Experts are gathered side by side as well, by those that have the same ones.
        rest = replace(shape, num_params=shape.num_params - shape.expert_params, expert_params=0.0)
        rest_bytes = self._shared_bytes(rest, mode)
        kept = mesh.expert / num_shards
        at_card = min(mesh.expert, max(part.gpus for part in parts))
        return self._sent_s(parts, (num_shards - 1) / num_shards * rest_bytes, at_card=1, at_link=alike) + self._sent_s(
            parts, (1 - kept) * (all_bytes - rest_bytes), at_card=at_card, at_link=mesh.expert * alike
        )

    def _shared_bytes(self, shape: ModelShape, mode: TrainingMode) -> float:
        """What processes gather and add up for a pack, each but for its own part."""
        gathered = gathered_bytes(shape, mode, num_passes=self._num_passes, num_scoring_passes=self._num_scoring)
        return gathered + reduced_bytes(shape, mode, num_passes=self._num_passes)

    def split_s(self, part: Part, tensor: int) -> float:
        """Sums of a sample's hidden states over those that split layers, for which all wait."""
        if tensor == 1:
            return 0.0
        gpu = self._problem.gpu_types[part.node.gpu]
        sums = self._num_layers_summed
        sent = 2 * (tensor - 1) / tensor * _HALF_BYTES * self._shape.hidden * self._demand.trained_tokens
        latency_s = gpu.ar_latency_us * 1e-6 * self._demand.trained_tokens / self._pack_tokens
        return sums * (sent / (gpu.ar_bus_GBps * 1e9) + latency_s)

    @property
    def _num_layers_summed(self) -> float:
        """Sums of hidden states: two a layer forwards, and two backwards where something is trained."""
        return 2.0 * self._shape.num_layers * (2 * self._num_passes + self._num_scoring)

    def _pipeline(self, island: Island, mesh: Mesh, samples: float, alike: int) -> _Work:
        # All processes of an island have one share.
        samples *= island[0][0].share * mesh.pipeline
        passage, layers = self._passage(island, samples, alike), layers_of(mesh, self._shape.num_layers)
        packs = self.passes(samples)
        return _Work(packs * passage.compute_s(layers), packs * passage.hidden_s(layers))

    def passage(self, islands: Sequence[Island]) -> Passage:
        """Of a pack through each of these pipelines, which are alike."""
        samples = self._demand.samples_per_step * len(islands[0]) / sum(map(_size, islands))
        return self._passage(islands[0], samples, len(islands))

    def _passage(self, island: Island, samples: float, alike: int) -> Passage:
        """Of one of the packs of that many samples, which one process of each stage of an island has in a step."""
        packs = self.passes(samples)
        rounds = self.microbatches(samples / packs, len(island))
        microbatch = samples / packs / rounds
        last, num_shards = len(island) - 1, size_of(island[0])
        costs = []
        for index, stage in enumerate(island):
            rate = min(self.rates[part.node.name] for part in stage)
            gather = self._gathered_s(stage, num_shards)
            ends = (index == 0) + (index == last)
            costs.append(
                StageCost(
                    layer_s=microbatch * (1 - self.output_share) / self._shape.num_layers / rate,
                    extra_s=microbatch * self.output_share / rate if index == last else 0.0,
                    gather_layer_s=gather * self._shape.layer_params,
                    gather_extra_s=gather * ends * self._shape.embedding_params,
                )
            )
        links_s = [
            microbatch * self._hop_s(one, other, alike) + 2 * self._latency_s(one, other)
            for one, other in pairwise(island)
        ]
        return Passage(tuple(costs), tuple(links_s), rounds, self._problem.cost_model.dp_overlap)

    def microbatches(self, samples: float, stages: int) -> int:
        """Of a pack of that many samples."""
        return max(1, min(MICROBATCHES_PER_STAGE * stages, math.floor(samples + 1e-9)))

    def _hop_s(self, one: Sequence[Part], other: Sequence[Part], alike: int) -> float:
        """A sample's hidden states to the next stage, and their gradients back, in the other direction of the link."""
        sent = _MASTER_BYTES * self._shape.hidden * self._demand.trained_tokens
        sent *= self._num_passes + self._num_scoring
        columns = size_of(one)
        at_card = max(part.gpus for part in (*one, *other))
        return self._sent_s((*one, *other), sent, at_card=at_card, at_link=columns * alike)

    def _latency_s(self, one: Sequence[Part], other: Sequence[Part]) -> float:
        """Of the network between two stages."""
        return max(
            (
                self._network.latency_s(here.node.region, there.node.region)
                for here in one
                for there in other
                if here.node.region != there.node.region
            ),
            default=0.0,
        )

    def _gathered_s(self, parts: Sequence[Part], num_shards: int) -> float:
        """What a stage exchanges for a pack, by parameter: its weights once, and its gradients."""
        num_bytes = (2 + _MASTER_BYTES) * self._num_passes + 2 * self._num_scoring
        return self._sent_s(parts, (num_shards - 1) / num_shards * num_bytes, at_card=1, at_link=1)

    def _sent_s(self, parts: Sequence[Part], num_bytes: float, *, at_card: int, at_link: int) -> float:
        """Time to send so much between those, while others do as well: as many through a card, and between regions."""
        if len({part.machine for part in parts}) == 1:
            return num_bytes / (self._problem.gpu_types[parts[0].node.gpu].ar_bus_GBps * 1e9)
        card = min(part.node.nic_Gbps for part in parts) * 1e9 / 8
        regions = sorted({part.node.region for part in parts})
        between = [self._network.bytes_per_second(one, other) for one, other in combinations(regions, 2)]
        if between and not min(between):
            return math.inf
        return num_bytes * max(at_card / card, at_link / min(between) if between else 0.0)

    def _summed_s(self, islands: Sequence[Island], mesh: Mesh) -> float:
        """Gradients that islands exchange at the end of a step; of equal stages or splits after every pack."""
        num_islands = len(islands)
        if num_islands == 1:
            return 0.0
        sent = _MASTER_BYTES * self._shape.num_params * self._trained
        if mesh.is_uniform:
            # `replicate`: a ring of two sums after every backward pass.
            packs = self.passes(self._demand.samples_per_step * mesh.width / sum(map(_size, islands)))
            sent *= 2 / num_islands * packs
        machines = {part.machine for island in islands for stage in island for part in stage}
        if len(machines) == 1:
            inside = self._problem.gpu_types[islands[0][0][0].node.gpu].ar_bus_GBps * 1e9
            return (num_islands - 1) * sent / min(map(_size, islands)) / inside
        at_cards = self._at_cards_s(islands, (num_islands - 1) * sent)
        regions: dict[str, int] = {}
        for island in islands:
            region = island[0][0].node.region
            regions[region] = regions.get(region, 0) + 1
        across = [
            regions[one] * regions[other] * _divided(sent, self._network.bytes_per_second(one, other))
            for one, other in combinations(sorted(regions), 2)
        ]
        return max([at_cards, *across])

    @staticmethod
    def _at_cards_s(islands: Sequence[Island], sent: float) -> float:
        """Time of the machine with the most to send, if every island sends so much, each of its processes its part."""
        times: dict[str, float] = {}
        for island in islands:
            for part in (part for stage in island for part in stage):
                own = sent * part.gpus / _size(island) / (part.node.nic_Gbps * 1e9 / 8)
                times[part.machine] = times.get(part.machine, 0.0) + own
        return max(times.values())


def _size(island: Island) -> int:
    return sum(map(size_of, island))


def _exposed(work: _Work, overlap: float) -> float:
    return max(0.0, work.hidden_s - overlap * work.compute_s)


def _divided(num_bytes: float, bytes_per_second: float) -> float:
    return num_bytes / bytes_per_second if bytes_per_second else math.inf
