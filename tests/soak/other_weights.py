"""A checkpoint like another one, with other weights."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def write_other_weights(model_dir: Path, directory: Path) -> Path:
    """Every matrix a little off, seeded; all else the same."""
    shutil.copytree(model_dir, directory)
    noise = torch.Generator().manual_seed(1)
    tensors = {
        name: tensor + (0.02 * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)
        if tensor.ndim == 2
        else tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
