"""Samples the next token of every row of a batch: penalties, filters, and a draw that depends on the request alone.

The draw of a token is a function of (seed, position, that row's logits): a counter-based uniform number picks from
the cumulated distribution.  So neither the row's place, nor its batch mates, nor an eviction in between change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

_MASK = 2**64 - 1
_LIKELY = 256
"""Top-p first looks at so many of the likeliest tokens, and sorts the whole row only when they do not suffice."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How one request wants its tokens; neutral values switch a step off."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all.  Tokens as likely as the k-th stay as well."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or answer, multiplies negative ones."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens in the answer."""
    frequency_penalty: float = 0.0
    """Subtracted from tokens in the answer, times their number."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    """64 bits."""
    logprobs: int | None = None
    """None: no log probabilities; else how many of the likeliest tokens to tell beside the sampled one."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True)
class TokenHistory:
    """The tokens that penalties look at."""

    prompt: frozenset[int] = frozenset()
    answer: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Row:
    """What the sampler must know of one row."""

    settings: SamplingSettings
    position: int
    """Place of the new token in its sequence, prompt included: the counter of the draw."""
    history: TokenHistory | None = None
    """Needed with penalties only."""
    banned: tuple[int, ...] = ()
    """Tokens that must not come now."""

    @property
    def is_plain(self) -> bool:
        """Whether the row takes the likeliest of the model's own logits and tells nothing about them."""
        settings = self.settings
        return (
            settings.is_greedy
            and not settings.has_penalties
            and not settings.logit_bias
            and settings.logprobs is None
            and not self.banned
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the model's own probabilities, before penalties, temperature and filters."""

    chosen: float
    top: list[tuple[int, float]]
    """(token, log probability), likeliest first."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The outcome of one row."""

    token: int
    logprobs: Logprobs | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits: the splitmix64 generator (Steele, Lea, Flood 2014) at a counter."""
    return (_mix(_mix(seed) + position) >> 11) * 2.0**-53


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request; choice 0 keeps the request's own."""
    return seed & _MASK if index == 0 else _mix(_mix(seed ^ _MASK) + index)


def _mix(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[Row]) -> list[Sampled]:
    """The next token of each row.

    Args:
        logits: `[rows, V]`, any float dtype; not changed.
        rows: one for each row of logits.
    """
    if all(row.is_plain for row in rows):
        return [Sampled(token) for token in logits.argmax(dim=-1).tolist()]
    raw = logits.float()
    adjusted = _adjust(raw, rows)
    tokens = adjusted.argmax(dim=-1).tolist()
    drawn = [index for index, row in enumerate(rows) if not row.settings.is_greedy]
    if drawn:
        chosen = _draw(adjusted[drawn], [rows[index] for index in drawn])
        for index, token in zip(drawn, chosen, strict=True):
            tokens[index] = token
    logprobs = _logprobs(raw, tokens, rows)
    return [Sampled(token, told) for token, told in zip(tokens, logprobs, strict=True)]


def _adjust(raw: Tensor, rows: Sequence[Row]) -> Tensor:
    """Penalties, biases and bans; a copy only if there are any."""
    touched = [
        (index, row)
        for index, row in enumerate(rows)
        if row.settings.has_penalties or row.settings.logit_bias or row.banned
    ]
    if not touched:
        return raw
    adjusted = raw.clone()
    vocabulary = raw.shape[-1]
    for index, row in touched:
        if row.settings.has_penalties and row.history is not None:
            _penalise(adjusted[index], row.settings, row.history)
        bias = [(token, value) for token, value in row.settings.logit_bias if token < vocabulary]
        if bias:
            ids, values = zip(*bias, strict=True)
            adjusted[index, list(ids)] += torch.tensor(values, dtype=adjusted.dtype, device=adjusted.device)
        banned = [token for token in row.banned if token < vocabulary]
        if banned:
            adjusted[index, banned] = float("-inf")
    return adjusted


def _penalise(row: Tensor, settings: SamplingSettings, history: TokenHistory) -> None:
    """Change one row of logits `[V]` in place."""
    if settings.repetition_penalty != 1.0:
        seen = list(history.prompt | history.answer.keys())
        values = row[seen]
        factor = settings.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if history.answer and (settings.presence_penalty or settings.frequency_penalty):
        counts = torch.tensor(list(history.answer.values()), dtype=row.dtype, device=row.device)
        row[list(history.answer)] -= settings.presence_penalty + settings.frequency_penalty * counts


def _draw(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Temperature, then top-k, top-p and min-p, then the draw; `[rows, V]` float32."""
    device = logits.device
    temperatures = torch.tensor([row.settings.temperature for row in rows], device=device)
    scaled = logits / temperatures.clamp_min(1e-5).unsqueeze(1)
    _keep_top_k(scaled, [row.settings.top_k for row in rows])
    probabilities = torch.softmax(scaled, dim=-1)
    _keep_top_p(probabilities, [row.settings.top_p for row in rows])
    _keep_min_p(probabilities, [row.settings.min_p for row in rows])
    # In double precision the sum of some 10^5 float32 values is exact enough that its order does not matter.
    cumulated = probabilities.double().cumsum(dim=-1)
    points = torch.tensor(
        [uniform(row.settings.seed, row.position) for row in rows], dtype=torch.float64, device=device
    )
    targets = points.unsqueeze(1) * cumulated[:, -1:]
    # The first token whose cumulated probability exceeds the point; one that is filtered out adds nothing.
    tokens = torch.searchsorted(cumulated, targets, right=True).squeeze(1)
    last = (probabilities > 0).int().cumsum(dim=-1).argmax(dim=-1)
    chosen: list[int] = torch.minimum(tokens, last).tolist()
    return chosen


def _keep_top_k(scaled: Tensor, top_k: Sequence[int]) -> None:
    vocabulary = scaled.shape[-1]
    wanted = [index for index, k in enumerate(top_k) if 0 < k < vocabulary]
    if not wanted:
        return
    chosen = scaled[wanted]
    kth = torch.tensor([top_k[index] - 1 for index in wanted], device=scaled.device).unsqueeze(1)
    largest = chosen.topk(int(kth.max()) + 1, dim=-1).values
    scaled[wanted] = chosen.masked_fill(chosen < largest.gather(1, kth), float("-inf"))


def _keep_top_p(probabilities: Tensor, top_p: Sequence[float]) -> None:
    """Keep the likeliest tokens whose sum reaches p, and what is as likely as the last of them."""
    wanted = [index for index, p in enumerate(top_p) if p < 1.0]
    if not wanted:
        return
    chosen = probabilities[wanted]
    limits = torch.tensor([top_p[index] for index in wanted], dtype=torch.float64, device=chosen.device).unsqueeze(1)
    width = min(_LIKELY, chosen.shape[-1])
    likely = chosen.topk(width, dim=-1).values
    thresholds = _threshold(likely, limits)
    short = likely.double().sum(dim=-1) < limits.squeeze(1)
    if width < chosen.shape[-1] and bool(short.any()):
        thresholds[short] = _threshold(chosen[short].sort(dim=-1, descending=True).values, limits[short])
    probabilities[wanted] = chosen.masked_fill(chosen < thresholds, 0.0)


def _threshold(descending: Tensor, limits: Tensor) -> Tensor:
    """The smallest probability that is still kept, `[rows, 1]`."""
    before = descending.double().cumsum(dim=-1) - descending.double()
    last = (before < limits).sum(dim=-1, keepdim=True) - 1
    return descending.gather(1, last)


def _keep_min_p(probabilities: Tensor, min_p: Sequence[float]) -> None:
    if not any(min_p):
        return
    limits = torch.tensor(min_p, dtype=probabilities.dtype, device=probabilities.device).unsqueeze(1)
    probabilities.masked_fill_(probabilities < limits * probabilities.amax(dim=-1, keepdim=True), 0.0)


def _logprobs(raw: Tensor, tokens: Sequence[int], rows: Sequence[Row]) -> list[Logprobs | None]:
    told: list[Logprobs | None] = [None] * len(rows)
    wanted = [index for index, row in enumerate(rows) if row.settings.logprobs is not None]
    if not wanted:
        return told
    values = torch.log_softmax(raw[wanted], dim=-1)
    for place, index in enumerate(wanted):
        count = rows[index].settings.logprobs or 0
        top = values[place].topk(count)
        told[index] = Logprobs(
            float(values[place, tokens[index]]), list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        )
    return told
