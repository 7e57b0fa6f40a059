"""Ways to break a good model, and files that flags name, by the row of docs/errors.md that says what is answered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert_workers.model.checkpoint import INDEX_FILE, SINGLE_FILE
from tests.helpers.tiny_checkpoints import write_json

Change = Callable[[Path], object]
"""Of a directory: the model's, or the one that DIR stands for."""

NORM = "model.norm.weight"
GATE = "model.layers.1.mlp.gate.weight"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0}


def nothing(_: Path) -> None:
    pass


def with_config(**changes: Any) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        write_json(model / "config.json", config | changes)

    return change


def with_file(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def with_settings(text: str) -> Change:
    return with_file("cell.toml", text)


def without_file(name: str) -> Change:
    return lambda model: (model / name).unlink()


def renamed(name: str, new_name: str) -> Change:
    return lambda model: (model / name).rename(model / new_name)


def removed(model: Path) -> None:
    model.rename(model.with_name("elsewhere"))


def with_header(edit: Callable[[dict[str, Any]], object]) -> Change:
    """Edits the header of the weights; the data stay as they are."""

    def change(model: Path) -> None:
        file = model / SINGLE_FILE
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        edit(header)
        packed = json.dumps(header).encode()
        file.write_bytes(len(packed).to_bytes(8, "little") + packed + content[end:])

    return change


def cut_to(num_bytes: int) -> Change:
    def change(model: Path) -> None:
        file = model / SINGLE_FILE
        file.write_bytes(file.read_bytes()[:num_bytes])

    return change


def lengthened(model: Path) -> None:
    with (model / SINGLE_FILE).open("ab") as stream:
        stream.write(b"more")


def with_index(weight_map: dict[str, str]) -> Change:
    return lambda model: write_json(model / INDEX_FILE, {"weight_map": weight_map})


def with_tokenizer(edit: Callable[[dict[str, Any]], object]) -> Change:
    def change(model: Path) -> None:
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        edit(tokenizer)
        write_json(model / "tokenizer.json", tokenizer)

    return change


def with_one_more_token(tokenizer: dict[str, Any]) -> None:
    token = tokenizer["added_tokens"][0] | {"id": 3072, "content": "<|one more|>"}
    tokenizer["added_tokens"].append(token)


BAD_MODELS: dict[str, Change] = {
    "no such directory": removed,
    "no config.json": without_file("config.json"),
    "config.json is not JSON": with_file("config.json", "{"),
    "config.json is not an object": with_file("config.json", "[]"),
    "unknown architecture": with_config(architectures=["LlamaForCausalLM"]),
    "a size that is none": with_config(hidden_size=0),
    "a size beyond all bounds": with_config(num_hidden_layers=100_000),
    "quantised weights": with_config(quantization_config={"quant_method": "fp8"}),
    "a dtype that is not computed in": with_config(dtype="float8_e4m3fn"),
    "another rotary scaling": with_config(rope_parameters=LLAMA3),
    "a key that nobody knows": with_config(attention_sinks=4),
    "pickled weights": renamed(SINGLE_FILE, "pytorch_model.bin"),
    "shards without their index": renamed(SINGLE_FILE, "model-00001-of-00001.safetensors"),
    "an index that is not JSON": with_file(INDEX_FILE, "{"),
    "a shard is missing": with_index({NORM: "model-00001-of-00002.safetensors"}),
    "a shard outside the directory": with_index({NORM: "../model.safetensors"}),
    "a tensor that only the index knows": with_index({"model.ghost": SINGLE_FILE}),
    "a tensor is missing": with_header(lambda h: h.update({"model.mron.weight": h.pop(NORM)})),
    "wrong shape of a tensor": with_header(lambda h: h[GATE].update(shape=[64, 16])),
    "wrong dtype of a tensor": with_header(lambda h: h[GATE].update(dtype="F8_E4M3")),
    "a tensor longer than its shape": with_header(lambda h: h[GATE].update(shape=[15, 64])),
    "a file cut short": cut_to(200_000),
    "a file cut in its header": cut_to(5),
    "a file with bytes behind its tensors": lengthened,
    "no tokenizer": without_file("tokenizer.json"),
    "tokenizer.json is not JSON": with_file("tokenizer.json", "{"),
    "a tokenizer that is not byte-level": with_tokenizer(
        lambda t: t.update(decoder={"type": "Fuse"})
    ),
    "a tokenizer with more ids than the model": with_tokenizer(with_one_more_token),
    "a chat template that does not compile": with_file("chat_template.jinja", "{% if %}"),
    "a sampling default out of range": with_file("generation_config.json", '{"top_p": 0}'),
}

_TOML = "serve --config DIR/cell.toml #"
FILES: dict[str, Change] = {
    "serve --api-key-file DIR/key # empty": with_file("key", ""),
    "serve --api-key-file DIR/key # not text": with_file("key", b"\xff\xfe"),
    f"{_TOML} [cell": with_settings("[cell"),
    f"{_TOML} cell = 1": with_settings("cell = 1"),
    f"{_TOML} [colour]": with_settings("[colour]"),
    f"{_TOML} [cell] colour = 1": with_settings("[cell]\ncolour = 1"),
    f"{_TOML} [http] port = 'high'": with_settings("[http]\nport = 'high'"),
    f"{_TOML} [model] dtype = 'float16'": with_settings("[model]\ndtype = 'float16'"),
}
"""By the arguments that name them, with their comment."""
