"""Deterministic numerics ask for one thread, and tests build them while they are collected."""

import torch

torch.set_num_threads(1)
