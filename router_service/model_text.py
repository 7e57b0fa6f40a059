"""What of a checkpoint the text side needs: tokenizer, chat template, sampling defaults. Read and checked together."""

from dataclasses import dataclass
from pathlib import Path

from cluster.errors import CheckpointError
from router_service.chat_template import ChatTemplate, load_chat_template
from router_service.model_parsers import BY_TEMPLATE, ModelParsers, ParserNames, choose_parsers
from router_service.sampling_defaults import SamplingDefaults, load_sampling_defaults
from router_service.tokenizer import TextCodec


@dataclass(frozen=True)
class ModelText:
    codec: TextCodec
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    parsers: ModelParsers


def load_model_text(
    model_dir: Path, vocab_size: int, parser_names: ParserNames = BY_TEMPLATE
) -> ModelText:
    """Raises CheckpointError naming the file: missing, unreadable, not understood, or with ids that the model lacks."""
    codec = TextCodec(model_dir)
    if codec.max_token_id >= vocab_size:
        raise CheckpointError(
            f"{model_dir / 'tokenizer.json'}: has a token with id {codec.max_token_id}, config.json's "
            f"vocab_size is {vocab_size}; take the tokenizer of this model"
        )
    template = load_chat_template(model_dir)
    parsers = choose_parsers(parser_names, template)
    return ModelText(codec, template, load_sampling_defaults(model_dir), parsers)
