"""A small forward pass over the shares that ranks hold, in float32, bitwise independent of TP.

How the comparison can be exact: a sum of float32 numbers does not depend on its order when every
partial sum is representable. So weights are small multiples of a power of two (FP8 integers and
FP4 codes times block scales of 1/2 and 1), and activations are rounded to a grid before each
projection - the engine quantises them at the same places, to FP8 with power-of-two scales.
`exact_matmul` proves the property instead of trusting it: it fails when float32 and float64
disagree. What is not a sum of products (softmax, square root of softplus) is computed on tensors
whose shape does not depend on the number of ranks: one head, one expert column at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import silu

#: E2M1, the element format of MXFP4 (OCP Microscaling Formats v1.0, section 5.3.3).
FP4_VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def grid(x: torch.Tensor, step: float, limit: float) -> torch.Tensor:
    """Round to multiples of `step`, within +-`limit`: the test's activation quantisation."""
    return (x / step).round().clamp(-limit / step, limit / step) * step


def activation(x: torch.Tensor, shift: int = 0) -> torch.Tensor:
    return grid(x * 2.0**-shift, 1 / 8, 4.0)


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b.T` in float32; an assertion when rounding took place."""
    result = a @ b.T
    assert torch.equal(result.double(), a.double() @ b.double().T), "the sum is not exact"
    return result


def all_reduce(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over ranks; an assertion when the order matters or rounding took place."""
    total = torch.stack(list(parts)).sum(0)
    assert torch.equal(total.double(), torch.stack([part.double() for part in parts]).sum(0))
    return total


def dequantise_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`weight` [n, k] times a scale for each block; `scale` [n / block, k / block]."""
    block_n, block_k = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    full = scale.float().repeat_interleave(block_n, 0).repeat_interleave(block_k, 1)
    return weight.float() * full


def dequantise_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`packed` [n, k / 2] bytes, low nibble first; `scale` [n, k / 32]."""
    raw = packed.view(torch.uint8).long()
    codes = torch.stack([raw & 15, raw >> 4], -1).flatten(1)
    return FP4_VALUES[codes] * scale.float().repeat_interleave(32, 1)


@dataclass
class BlockShare:
    """What one rank holds of one layer or draft stage, dequantised to float32.

    Attributes:
        wq_a, wkv: Replicated, [q_lora, hidden] and [head_dim, hidden].
        wq_b: [heads of the rank * head_dim, q_lora].
        sinks: [heads of the rank].
        wo_a: [groups of the rank, o_lora, heads in a group * head_dim].
        wo_b: [hidden, groups of the rank * o_lora].
        gate, bias: Replicated, [experts, hidden] and [experts].
        experts: Expert number -> (w1, w3, w2) of the rank's width.
        shared: The same of the shared expert.
    """

    wq_a: torch.Tensor
    wkv: torch.Tensor
    wq_b: torch.Tensor
    sinks: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor
    gate: torch.Tensor
    bias: torch.Tensor
    experts: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Share:
    """What one rank holds of the model.

    Attributes:
        first: Token id of the first row of `embed` and `head`.
        real: Rows that are tokens; the rest is padding.
        embed, head: [rows of the rank, hidden].
        layers, stages: Target layers and draft stages.
        main_proj: Replicated, [hidden, stages * hidden].
        markov_w1, markov_w2: Replicated, [vocabulary, markov rank].
    """

    first: int
    real: int
    embed: torch.Tensor
    head: torch.Tensor
    layers: list[BlockShare]
    stages: list[BlockShare] = field(default_factory=list)
    main_proj: torch.Tensor | None = None
    markov_w1: torch.Tensor | None = None
    markov_w2: torch.Tensor | None = None


def embed(shares: Sequence[Share], tokens: torch.Tensor) -> torch.Tensor:
    parts = []
    for share in shares:
        mine = (tokens >= share.first) & (tokens < share.first + share.real)
        rows = share.embed[torch.where(mine, tokens - share.first, 0)]
        parts.append(rows * mine.unsqueeze(1))
    return all_reduce(parts)


def _attention_part(
    share: BlockShare, x: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    head_dim = share.wkv.shape[0]
    queries = activation(exact_matmul(x, share.wq_a), 5)
    latent = activation(exact_matmul(keys, share.wkv), 5)
    heads = []
    for head, sink in enumerate(share.sinks):
        rows = share.wq_b[head * head_dim : (head + 1) * head_dim]
        query = activation(exact_matmul(queries, rows), 5)
        score = exact_matmul(query, latent) / 32 + mask
        top = torch.maximum(score.amax(1), sink)
        weights = torch.exp(score - top.unsqueeze(1))
        total = weights.sum(1) + torch.exp(sink - top)
        heads.append(grid((weights / total.unsqueeze(1)) @ latent, 1 / 64, 4.0))
    groups, _, width = share.wo_a.shape
    per_group = width // head_dim
    outputs = []
    for group in range(groups):
        inside = torch.cat(heads[group * per_group : (group + 1) * per_group], 1)
        outputs.append(activation(exact_matmul(inside, share.wo_a[group]), 5))
    return exact_matmul(torch.cat(outputs, 1), share.wo_b)


def _swiglu(x: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    gate = exact_matmul(x, w1) * 2.0**-5
    up = exact_matmul(x, w3) * 2.0**-5
    return activation(silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0))


def route(share: BlockShare, x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Expert numbers and weights: sqrt(softplus(logit)), the bias only for the choice."""
    logits = exact_matmul(x, share.gate) * 2.0**-6
    columns = [
        torch.logaddexp(torch.zeros_like(c), c).sqrt()
        for c in (logits[:, e].clone() for e in range(logits.shape[1]))
    ]
    scores = torch.stack(columns, 1)
    chosen = (scores + share.bias).sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, chosen)
    return chosen, grid(1.5 * weights / weights.sum(1, keepdim=True), 1 / 32, 4.0)


def _experts_part(share: BlockShare, x: torch.Tensor, top_k: int) -> torch.Tensor:
    chosen, weights = route(share, x, top_k)
    rows = []
    for token in range(x.shape[0]):
        row = x[token : token + 1]
        total = exact_matmul(_swiglu(row, *share.shared[:2]), share.shared[2])
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            if expert in share.experts:
                w1, w3, w2 = share.experts[expert]
                total = total + weight * exact_matmul(_swiglu(row, w1, w3), w2)
        rows.append(total)
    return torch.cat(rows)


def block(
    shares: Sequence[BlockShare],
    x: torch.Tensor,
    top_k: int,
    context: torch.Tensor | None = None,
) -> torch.Tensor:
    """One layer over all ranks; `context` adds rows that every token may attend."""
    tokens = x.shape[0]
    mask = torch.full((tokens, tokens), float("-inf")).triu(1)
    keys = x
    if context is not None:
        keys = torch.cat([context, x])
        mask = torch.cat([torch.zeros(tokens, context.shape[0]), mask], 1)
    attended = all_reduce([_attention_part(s, x, keys, mask) for s in shares])
    x = activation(x + attended * 2.0**-6)
    mixed = all_reduce([_experts_part(s, x, top_k) for s in shares])
    return activation(x + mixed * 2.0**-6)


def local_logits(share: Share, x: torch.Tensor) -> torch.Tensor:
    """Logits of every row that the rank holds, padding included."""
    return exact_matmul(x, share.head)


def gather_logits(parts: Iterable[torch.Tensor], vocabulary: int) -> torch.Tensor:
    """Ranks side by side, cut to the vocabulary: what SGLang does before sampling."""
    return torch.cat(list(parts), 1)[:, :vocabulary]


def target(
    shares: Sequence[Share], tokens: torch.Tensor, top_k: int
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Hidden states after each layer, and the logits of every rank side by side."""
    x = embed(shares, tokens)
    hidden = []
    for layers in zip(*(share.layers for share in shares), strict=True):
        x = block(layers, x, top_k)
        hidden.append(x)
    return hidden, torch.cat([local_logits(share, x) for share in shares], 1)


def draft(
    shares: Sequence[Share],
    hidden: Sequence[torch.Tensor],
    tokens: torch.Tensor,
    top_k: int,
    steps: int,
) -> tuple[list[int], torch.Tensor]:
    """Tokens that the DSpark head drafts greedily after `tokens`, and the last step's logits."""
    first = shares[0]
    assert first.main_proj is not None
    features = torch.cat(list(hidden), 1)
    context = activation(exact_matmul(features, first.main_proj), 6)
    x = embed(shares, tokens)
    for stages in zip(*(share.stages for share in shares), strict=True):
        x = block(stages, x, top_k, context)
    base = [local_logits(share, x[-1:]) for share in shares]
    drafted: list[int] = []
    previous = int(tokens[-1])
    logits = torch.empty(0)
    for _ in range(steps):
        parts = []
        for share, local in zip(shares, base, strict=True):
            assert share.markov_w1 is not None and share.markov_w2 is not None
            rows = share.markov_w2[share.first : share.first + share.real]
            bias = exact_matmul(share.markov_w1[previous : previous + 1], rows)
            # The bias covers the real rows; the padded ones are out of the race.
            parts.append(local[:, : share.real] + bias)
        logits = torch.cat(parts, 1)
        previous = int(logits.argmax())
        drafted.append(previous)
    return drafted, logits
