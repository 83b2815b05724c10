"""What must be true of a node that a job may use: one condition on one label, or on one of the facts that nodes tell of themselves."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from raycontrol.hardware import Traits

GPU_MODEL, GPU_MEMORY_GIB, RDMA = "gpu_model", "gpu_memory_gib", "rdma"
FACTS = (GPU_MODEL, GPU_MEMORY_GIB, RDMA)
"""Not labels: asked of the nodes themselves."""

_IN = re.compile(r"(!?)in\s*\(([^()]*)\)\Z")
_NUMBER = re.compile(r"(>=|<=|>|<|)\s*(\d{1,9}(?:\.\d{1,3})?)\Z")
_COMPARES: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "": operator.eq,
}


@dataclass(frozen=True)
class Words:
    """One of these values; ``negated``: none of them."""

    values: tuple[str, ...]
    negated: bool = False

    def holds(self, value: str | None) -> bool:
        return (value in self.values) != self.negated

    def holds_of_models(self, models: frozenset[str]) -> bool:
        """Whether every GPU is of one of these models (negated: of none of them). A model goes by any words of its name."""
        if not models or self.negated:
            return self.negated and not any(self._names(model) for model in models)
        return all(self._names(model) for model in models)

    def _names(self, model: str) -> bool:
        return any(_contains_words(model, value) for value in self.values)


@dataclass(frozen=True)
class Comparison:
    """``sign`` is how the fact has to compare with ``number``; without one they are equal."""

    sign: str
    number: float

    def holds(self, value: float) -> bool:
        return _COMPARES[self.sign](value, self.number)


@lru_cache(maxsize=4096)
def parsed(name: str, text: str) -> Words | Comparison:
    """Return the condition that ``text`` puts on the label or fact ``name``; raises ValueError(rule)."""
    if name == RDMA:
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return Words((text,))
    if name == GPU_MEMORY_GIB:
        found = _NUMBER.match(text)
        if found is None:
            raise ValueError('must be a number of GiB such as 80, or a comparison such as ">= 80"')
        return Comparison(found[1], float(found[2]))
    return _words(text)


def _words(text: str) -> Words:
    if text.startswith((">", "<")):
        raise ValueError(f"only {GPU_MEMORY_GIB} can be compared")
    found = _IN.match(text)
    values = tuple(value.strip() for value in found[2].split(",")) if found else (text.removeprefix("!"),)
    if not all(values) or any({*value} & {*"!(),"} for value in values):
        raise ValueError('must be a value, "!value", "in(a,b)" or "!in(a,b)"')
    return Words(values, text.startswith("!"))


def needs_label(name: str, text: str) -> bool:
    """Whether no node fulfils the condition that does not have a label of this name."""
    condition = parsed(name, text)
    return name not in FACTS and isinstance(condition, Words) and not condition.negated


def holds(name: str, text: str, labels: Mapping[str, str], traits: Traits | None) -> bool | None:
    """Whether the condition is true of a node with these labels and traits; None where that is not known yet."""
    condition = parsed(name, text)
    if name not in FACTS:
        assert isinstance(condition, Words)
        return condition.holds(labels.get(name))
    if traits is None:
        return None
    if isinstance(condition, Comparison):
        return condition.holds(traits.gpu_memory_gib)
    if name == RDMA:
        return condition.holds("true" if traits.rdma else "false")
    return condition.holds_of_models(traits.gpu_models)


def _contains_words(model: str, words: str) -> bool:
    """``H100`` and ``h100 80gb`` are in ``NVIDIA H100 80GB HBM3``; ``A10`` is not in ``NVIDIA A100``."""
    pattern = rf"(?<![a-z0-9]){re.escape(words.lower())}(?![a-z0-9])"
    return re.search(pattern, model.lower()) is not None
