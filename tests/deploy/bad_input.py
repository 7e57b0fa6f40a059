"""Ways to break a good model, and files that flags name, by the row of docs/errors.md that says what is answered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expert_workers.model.checkpoint import INDEX_FILE, SINGLE_FILE
from prefix_store.journal.directory import StateDirectory
from tests.helpers.certificates import ANOTHER_KEY, CERTIFICATE, KEY, LOCKED_KEY
from tests.helpers.tiny_checkpoints import QWEN3_CONFIG, write_json

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


def without_key(key: str) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        del config[key]
        write_json(model / "config.json", config)

    return change


def with_qwen3(**changes: Any) -> Change:
    """Another config: the weights are never looked at."""
    return lambda model: write_json(model / "config.json", QWEN3_CONFIG | changes)


def with_file(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def with_open_file(name: str, content: str) -> Change:
    return both(with_file(name, content), lambda directory: (directory / name).chmod(0o644))


def with_private_file(name: str, content: str) -> Change:
    return both(with_file(name, content), lambda directory: (directory / name).chmod(0o600))


def both(*changes: Change) -> Change:
    return lambda directory: [change(directory) for change in changes]


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
    "a key that is missing": without_key("q_lora_rank"),
    "one size, two values": with_config(num_local_experts=8),
    "a model type of another architecture": with_config(model_type="qwen3_moe"),
    "another activation": with_config(hidden_act="gelu"),
    "an end-of-sequence id beyond the vocabulary": with_file(
        "generation_config.json", '{"eos_token_id": [2, 3072]}'
    ),
    "gate: groups that do not divide the experts": with_config(n_group=3),
    "gate: groups of one expert": with_config(n_group=16),
    "gate: more groups kept than there are": with_config(topk_group=5),
    "gate: more experts per token than kept groups hold": with_config(num_experts_per_tok=9),
    "gate: another scoring": with_config(scoring_func="softmax"),
    "gate: another choice of experts": with_config(topk_method="greedy"),
    "gate: a renormalisation that is neither on nor off": with_config(norm_topk_prob=None),
    "gate: a scaling factor that is none": with_config(routed_scaling_factor=0),
    "DeepSeek-V3: no layer with experts": with_config(first_k_dense_replace=3),
    "DeepSeek-V3: experts in every second layer": with_config(moe_layer_freq=2),
    "DeepSeek-V3: fewer KV heads than heads": with_config(num_key_value_heads=2),
    "DeepSeek-V3: a rotation of half a pair": with_config(qk_rope_head_dim=7),
    "Qwen3: a dense layer that is none of the model's": with_qwen3(mlp_only_layers=[2]),
    "Qwen3: dense layers that are no list": with_qwen3(mlp_only_layers=1),
    "Qwen3: all layers dense": with_qwen3(mlp_only_layers=[0, 1]),
    "Qwen3: a step past the last layer": with_qwen3(decoder_sparse_step=3),
    "Qwen3: a step of nothing": with_qwen3(decoder_sparse_step=0),
    "Qwen3: KV heads that do not divide the heads": with_qwen3(num_key_value_heads=3),
    "Qwen3: heads of an odd size": with_qwen3(head_dim=15),
    "Qwen3: heads whose size does not follow": with_qwen3(head_dim=None, hidden_size=60),
    "Qwen3: a sliding window": with_qwen3(use_sliding_window=True, sliding_window=4096),
    "Qwen3: heads without norm": with_qwen3(use_qk_norm=False),
    "Qwen3: more experts per token than experts": with_qwen3(num_experts_per_tok=17),
    "Qwen3: groups of experts": with_qwen3(n_group=2),
    "Qwen3: shared experts": with_qwen3(shared_expert_intermediate_size=128),
    "Qwen3: a bias of queries, keys and values alone": with_qwen3(qkv_bias=True),
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

_TLS = "serve --tls-cert DIR/cert.pem --tls-key DIR/key.pem #"
_TOML = "serve --config DIR/cell.toml #"
FILES: dict[str, Change] = {
    "serve --api-key-file DIR/key # empty": with_file("key", "# no key yet\n\n"),
    "serve --api-key-file DIR/key # three words": with_file("key", "one\n\na b c\n"),
    "serve --api-key-file DIR/key # a key twice": with_file("key", "a same\nb same\n"),
    "serve --api-key-file DIR/key # a key that no header can hold": with_file("key", "schlüssel"),
    "serve --api-key-file DIR/key # a tenant that no log can hold": with_file("key", "a=b key"),
    "serve --api-key-file DIR/key # not text": with_file("key", b"\xff\xfe"),
    "serve --api-key-file DIR/key # that every user may read": with_open_file("key", "a key"),
    "serve --admin-key-file DIR/key # that every user may read": with_open_file("key", "a key"),
    "POINTSMAN_API_KEYS=same serve --admin-key-file DIR/key # with the same key": with_private_file(
        "key", "same"
    ),
    f"{_TLS} a key that every user may read": both(
        with_file("cert.pem", CERTIFICATE), with_open_file("key.pem", KEY)
    ),
    f"{_TLS} a certificate alone": with_file("cert.pem", CERTIFICATE),
    f"{_TLS} neither is PEM": both(with_file("cert.pem", "one"), with_file("key.pem", "two")),
    f"{_TLS} another key": both(
        with_file("cert.pem", CERTIFICATE), with_file("key.pem", ANOTHER_KEY)
    ),
    f"{_TLS} a key with a passphrase": both(
        with_file("cert.pem", CERTIFICATE), with_file("key.pem", LOCKED_KEY)
    ),
    "serve --state-dir DIR/state # a file": with_file("state", "mine"),
    "serve --state-dir DIR/state # in use": lambda directory: StateDirectory(directory / "state"),
    f"{_TOML} [cell": with_settings("[cell"),
    f"{_TOML} cell = 1": with_settings("cell = 1"),
    f"{_TOML} [colour]": with_settings("[colour]"),
    f"{_TOML} [cell] colour = 1": with_settings("[cell]\ncolour = 1"),
    f"{_TOML} [http] port = 'high'": with_settings("[http]\nport = 'high'"),
    f"{_TOML} [model] dtype = 'float16'": with_settings("[model]\ndtype = 'float16'"),
}
"""By the arguments that name them, with their comment."""
