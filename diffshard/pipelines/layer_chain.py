"""Layers of a step as a chain: where it may be cut well, and what each layer keeps, sends and returns."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from diffshard.pipelines.cutting import UncutStep, cut_step
from search_spaces.pipelines.residuals import Cut, CutCandidate
from search_spaces.pipelines.stage_labels import LabelledStep, StageEquation
from search_spaces.pipelines.step_parts import num_bytes
from search_spaces.replay import user_source

_NEIGHBOURS = 8
"""How many candidates before and after a cut are compared with it: none of them may send fewer bytes."""


@dataclass(frozen=True)
class LayerChain:
    """Layers of a step, each one all equations between two possible cuts.

    Attributes:
      cuts: `[L - 1]`, where layers 1 to L - 1 begin.
      state_bytes: `[L]`, of the arguments that a layer keeps.
      sent_bytes: `[L]`, of activations that go into a layer; 0 for the first.
      returned_bytes: `[L]`, of gradients that come back out of a layer; 0 for the first.
      signatures: `[L]`, equal for layers of equal equations.
      sources: `[L]`, the first of the user's lines in a layer.
    """

    cuts: tuple[Cut, ...]
    state_bytes: np.ndarray
    sent_bytes: np.ndarray
    returned_bytes: np.ndarray
    signatures: tuple[Hashable, ...]
    sources: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.cuts) + 1

    def cuts_before(self, layers: Iterable[int]) -> list[Cut]:
        """Returns the cuts with which some layers begin; the first layer and the end of the last have none."""
        return [self.cuts[layer - 1] for layer in layers if 0 < layer < len(self)]


def layer_chain(step: UncutStep, most_layers: int) -> LayerChain:
    """Finds where a step may be cut well: where fewer bytes of activations are live than around.

    Args:
      most_layers: of more layers neighbours with the least arithmetic are joined.

    Raises:
      ValueError: the step cannot be cut.
    """
    candidates = step.candidates()
    at = _least_bytes(candidates)
    work = list(np.diff([0.0, *(candidates[i].flops_before for i in at), candidates[-1].flops_before])) if at else []
    while len(work) > most_layers:
        least = int(np.argmin(np.add(work[1:], work[:-1])))
        at.pop(least)
        work[least : least + 2] = [work[least] + work[least + 1]]
    cuts = [candidates[i].cut for i in at]
    cut = cut_step(step, cuts)
    labelled = LabelledStep(cut.parts, cut.cuts)
    state = np.zeros(len(cuts) + 1)
    for i in cut.parts.inputs:
        key = ("value", i)
        if i not in cut.parts.batch and key in labelled.avals:
            state[labelled.homes.get(key, 0)] += num_bytes(labelled.avals[key])
    sent = np.array([0, *(candidates[i].bytes_sent for i in at)], float)
    layers = _layers(labelled)
    sources = tuple(next(filter(None, (user_source(e.equation) for e in layer)), "") for layer in layers)
    returned = _returned_bytes(labelled)
    return LayerChain(tuple(cuts), state, sent, returned, tuple(map(_signature, layers)), sources)


def _least_bytes(candidates: Sequence[CutCandidate]) -> list[int]:
    """Returns the candidates that send no more than those around them, the first of such in a row.

    All trips of a scan over layers are among them: each trip is a layer.
    """
    num_bytes = np.array([candidate.bytes_sent for candidate in candidates])
    found: list[int] = []
    last = -len(candidates)  # the last one that is no trip
    for at, candidate in enumerate(candidates):
        around = num_bytes[max(at - _NEIGHBOURS, 0) : at + _NEIGHBOURS + 1]
        is_row = at - last <= _NEIGHBOURS // 2
        if candidate.cut.trip:
            found.append(at)
        elif num_bytes[at] == around.min() and num_bytes[at] and not is_row:
            found.append(at)
            last = at
    return found


def _layers(step: LabelledStep) -> list[list[StageEquation]]:
    """Returns the equations of each layer."""
    layers: list[list[StageEquation]] = [[] for _ in range(step.num_stages)]
    for equation in step.equations:
        if equation.label is not None:
            layers[equation.label.stage].append(equation)
    return layers


def _returned_bytes(step: LabelledStep) -> np.ndarray:
    """Returns the bytes that the backward pass of each layer and of those after it make for earlier ones, `[L]`."""
    first = {}  # the earliest layer whose backward pass reads an array
    for equation in step.equations:
        if equation.label is not None and equation.label.kind == "backward":
            for key in equation.reads:
                first[key] = min(first.get(key, step.num_stages), equation.label.stage)
    returned = np.zeros(step.num_stages)
    for equation in step.equations:
        if equation.label is not None and equation.label.kind == "backward":
            for key in equation.makes:
                returned[first.get(key, step.num_stages) + 1 : equation.label.stage + 1] += num_bytes(step.avals[key])
    return returned


def _signature(layer: Sequence[StageEquation]) -> Hashable:
    """Returns the operations of a layer and the shapes of their results."""
    return hash(tuple((e.equation.primitive.name, tuple(str(v.aval) for v in e.equation.outvars)) for e in layer))
