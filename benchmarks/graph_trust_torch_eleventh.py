"""Pairs of graphs of hyper_connections, further transformers, an actor and critic, and a net with labels in time.

    python benchmarks/graph_trust_torch_eleventh.py FOLDER    # needs torch, transformers and this

For `graph_trust.py`. Each pair as Dynamo's graph, joint graph, forward and backward, as far as these differ. Programs,
changes and what is expected were written, and frozen in a commit, before any result of the tenth set, and measured
once, after what that showed was mended.
"""

from __future__ import annotations

import torch
import transformers
from graph_trust_pairs import SAME, Options, Pair, Texts, main
from graph_trust_torch import graphs
from hyper_connections import HyperConnections
from torch import nn
from torch.nn import functional as F


def streams(o: Options) -> Texts:
    size = dict(dim=6, dropout=0.1, tanh=True, layer_index=0)
    own = HyperConnections(o.get("count", 2), **size | o.get("sized", {}), branch=nn.Linear(6, 6)).train()
    spread, joined = HyperConnections.get_expand_reduce_stream_functions(o.get("count", 2), disable=False)
    return graphs(lambda x: joined(own(spread(x))).square().mean(), torch.randn(2, 4, 6))


def judged(o: Options) -> Texts:
    """An actor and its critic, advantages by a scan backwards in time."""
    body, policy, value = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def f(seen: torch.Tensor, act: torch.Tensor, reward: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        h = o.get("act", F.elu)(body(seen))
        guess, odds = value(h).squeeze(-1), policy(h).log_softmax(-1)
        last, gains = torch.zeros(2), []
        with torch.no_grad():
            for t in reversed(range(3)):
                apart = reward[t] + o.get("gamma", 0.98) * guess[t + 1] * (1 - done[t]) - guess[t]
                last = apart + 0.98 * o.get("trace", 0.9) * (1 - done[t]) * last
                gains.insert(0, last)
        gain = torch.stack(gains)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6) if o.get("normal") else gain
        told = odds[:-1].gather(-1, act[..., None]).squeeze(-1)
        wrong = F.huber_loss(guess[:-1], (gain + guess[:-1]).detach() if o.get("stopped", True) else gain + guess[:-1])
        mixed = -(odds.exp() * odds).sum(-1).mean()
        return -(told * gain).mean() + 0.5 * wrong - o.get("entropy", 0.01) * mixed

    given = torch.randint(0, 3, (3, 2)), torch.randn(3, 2), torch.zeros(3, 2)
    return graphs(f, torch.randn(4, 2, 4), *given)


def timed(o: Options) -> Texts:
    """Labels in time by connectionist alignment over strided convolutions."""
    front = nn.Sequential(nn.Conv1d(3, 6, 3, stride=o.get("stride", 1), padding=1), nn.BatchNorm1d(6), nn.SiLU())
    head = nn.Linear(6, 5)

    def f(x: torch.Tensor) -> torch.Tensor:
        h = front(x).transpose(1, 2)
        h = F.dropout(h, o.get("drop", 0.1))
        one, two = head(h).log_softmax(o.get("axis", -1)), h.mean(1)
        if o.get("turned"):
            right, left = two.cos().sum(), one.exp().sum()
            return left + right
        left, right = one.exp().sum(), two.cos().sum()
        return left + right

    return graphs(f, torch.randn(2, 3, 8))


def mistral(o: Options) -> Texts:
    size = dict(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
                max_position_embeddings=16, num_key_value_heads=1, sliding_window=None)  # fmt: skip
    config = transformers.MistralConfig(**size | o, attn_implementation="eager")
    model = transformers.MistralModel(config).train()
    return graphs(lambda ids: model(ids, use_cache=False).last_hidden_state, torch.randint(0, 30, (2, 6)))


PAIRS: list[Pair] = [
    ("streams tanh", streams, {}, {"sized": {"tanh": False}}, r"tanh"),
    ("streams count", streams, {}, {"count": 3}, r"parameter|2.*3"),
    ("judged trace", judged, {}, {"trace": 0.95}, r"0\.882.*0\.931"),
    ("judged normal", judged, {}, {"normal": True}, r"\+ .*(?:mean|std|sub|var)"),
    ("judged unstopped", judged, {}, {"stopped": False}, r"detach|output|\+ |- |saved"),
    ("timed axis", timed, {}, {"axis": 1}, r"-1.*1|2.*1|softmax"),
    ("timed stride", timed, {}, {"stride": 2}, r"stride|1.*2|conv"),
    ("mistral window", mistral, {}, {"sliding_window": 3}, r"\+ |gt|sub|3|and|replaced"),
    ("mistral eps", mistral, {}, {"rms_norm_eps": 1e-5}, r"1e-0?6.*1e-0?5"),
    ("nothing timed", timed, {}, {"turned": True}, SAME),
]  # fmt: skip


if __name__ == "__main__":
    main(__doc__, {"eleventh": PAIRS})
