"""The model of one rank: what it is, how it computes, and what exchanges its weights."""

from dataclasses import dataclass

from cluster.model_spec import ModelSpec
from expert_workers.model.transformer import Transformer
from expert_workers.weight_exchange import WeightExchange


@dataclass(frozen=True)
class RankModel:
    """weights: those of the transformer."""

    spec: ModelSpec
    transformer: Transformer
    weights: WeightExchange
