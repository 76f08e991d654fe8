"""The embedded default: a model of 0.11 M parameters with a tokenizer made for the word problems.

Qwen2's architecture, so everything downstream treats it as any Hugging Face model. 115 tokens: printable characters
(digits stay single), whole words of the problems' templates with their leading space, and "#### ". Other words fall
to characters; characters outside the vocabulary are dropped. The chat template is the content and a newline.

transformers loads the tokenizer of a Qwen2 model as its own class, which keeps only the vocabulary and the added
tokens of tokenizer.json and builds the rest itself. So ours is of exactly that build (byte-level BPE, here without
merges), and the words are added tokens: both ways of loading give the same ids.
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from psrl.data.prepare.problems import OBJECTS, PRONOUNS

_SPECIAL = ("<pad>", "<eos>")
_CHARACTERS = "0123456789\n .,?+-*=#:/!$'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_WORDS = ("has", "had", "He", "She", "buys", "and", "loses", "How", "many", "gave", "away", "got", "bags", "of", "more")
_ANSWER_MARK = "#### "
_MAX_POSITIONS = 1024
_QWEN2_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ message['content'] }}{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}
{%- endfor -%}
"""


def vocabulary() -> list[str]:
    """The 115 tokens in the order of their ids."""
    return [*_SPECIAL, *_CHARACTERS, *_words()]


def _words() -> list[str]:
    return [*PRONOUNS, *(f" {word}" for word in (*PRONOUNS, *OBJECTS, *_WORDS, "in", "all")), _ANSWER_MARK]


def make_tokenizer() -> tokenizers.Tokenizer:
    """Splits text into known words (longest first) and single characters; each piece is one token."""
    byte_level = {"\n": "Ċ", " ": "Ġ"}  # how byte-level tokenizers write these
    names = [*_SPECIAL, *(byte_level.get(character, character) for character in _CHARACTERS), *_words()]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN2_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in _words()])
    return tokenizer


def tiny(out: Path, seed: int = 0) -> Path:
    """Make the model directory `out` with weights drawn by `seed` (std 0.05, fp32). Imports torch. Returns `out`.

    The weights know nothing yet: the warm start teaches both styles of answer.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokens = vocabulary()
    config = Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_POSITIONS,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokens.index("<eos>"),
        pad_token_id=tokens.index("<pad>"),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    write_tokenizer(out)
    return out


def write_tokenizer(out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja to `out`."""
    make_tokenizer().save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "unk_token": None,
        "model_max_length": _MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
