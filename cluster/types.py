"""Ids and small closed sets that every process shares. No behaviour beyond validation lives here."""

from typing import Literal, NewType

Rank = NewType("Rank", int)
SeqId = NewType("SeqId", int)
BlockId = NewType("BlockId", int)
StepId = NewType("StepId", int)
RequestId = NewType("RequestId", str)
Namespace = NewType("Namespace", str)

FinishReason = Literal["stop", "length", "abort", "error"]
DispatchMode = Literal["local", "negotiated"]
ExchangeKind = Literal["gloo", "nccl"]
StorePart = Literal["kv", "routes", "scores"]
EvictTarget = Literal["kv", "routes", "scores", "all"]
Running = Literal["abort", "restart"]
"""What becomes of requests that run when the weights are exchanged."""
TokenSource = Literal["computed", "cached", "replayed"]
