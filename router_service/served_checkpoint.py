"""The checkpoint that is served, as far as another one may take its place: the same model, said and read the same way.

HTTP servers keep tokenizer, chat template and sampling defaults that they have read at their start. What another
directory has of these must therefore be equal; what it has not (trainers often write weights only) stays as it is.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from cluster.errors import CheckpointError
from cluster.model_config.same_model import require_same_model
from cluster.model_spec import ComputeDtype, ModelSpec
from cluster.namespace import model_fingerprint
from router_service.chat_template import load_chat_template, present, read_json_object
from router_service.sampling_defaults import load_sampling_defaults

_TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


class WeightSource(Protocol):
    def inspect(self, model_dir: Path) -> str:
        """The fingerprint of a directory whose weights may be served instead; seconds for a large one. Raises
        CheckpointError naming the first thing that is wrong with it."""
        ...


class ServedCheckpoint:
    """Reads the text side of `model_dir` once: the directory may be gone when another one comes."""

    def __init__(self, model_dir: Path, spec: ModelSpec, dtype: ComputeDtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._text_digests = _text_digests(model_dir)
        self._tokenizer = _tokenizer(model_dir)
        self._template = _template(model_dir)
        self._defaults = load_sampling_defaults(model_dir)

    def inspect(self, model_dir: Path) -> str:
        if not model_dir.is_absolute():
            raise CheckpointError(f"{str(model_dir)!r} is no absolute path; every rank reads it")
        try:
            is_directory = model_dir.is_dir()
        except OSError as error:
            raise CheckpointError(f"{model_dir}: {error.strerror}") from error
        if not is_directory:
            raise CheckpointError(f"{model_dir} is no directory on the host of the engine")
        require_same_model(model_dir, self._spec)
        self._require_same_text(model_dir)
        return model_fingerprint(model_dir, self._dtype)

    def _require_same_text(self, model_dir: Path) -> None:
        """Files that are the same byte for byte are not read into objects: a compiled template refers to itself, and
        an engine's process has no full garbage collections, so each exchange of weights would leave one."""
        if _text_digests(model_dir) == self._text_digests:
            return
        if _tokenizer(model_dir) not in (None, self._tokenizer):
            raise _differs(model_dir / "tokenizer.json", "the tokenizer")
        if _template(model_dir) not in (None, self._template):
            raise _differs(model_dir / "tokenizer_config.json", "chat template or special tokens")
        file = model_dir / "generation_config.json"
        if present(file) and load_sampling_defaults(model_dir) != self._defaults:
            raise _differs(file, "the sampling defaults")


def _text_digests(model_dir: Path) -> dict[str, str | None]:
    """By name; None of what is not there, empty of what cannot be read."""
    digests: dict[str, str | None] = {}
    for name in _TEXT_FILES:
        file = model_dir / name
        digests[name] = "" if present(file) else None
        with suppress(OSError), file.open("rb") as stream:
            digests[name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _tokenizer(model_dir: Path) -> str | None:
    """Equal for equal content, however it is written."""
    file = model_dir / "tokenizer.json"
    if not present(file):
        return None
    content = json.dumps(read_json_object(file), sort_keys=True)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()


def _template(model_dir: Path) -> tuple[str, dict[str, str]] | None:
    template = load_chat_template(model_dir)
    return None if template is None else (template.source, template.special_tokens)


def _differs(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: {what} would be others than those that are served, which HTTP servers keep; take the "
        "file away, or start a server with this directory"
    )
