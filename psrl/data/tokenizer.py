"""A tokenizer with a chat template, without torch.

It reads what a Hugging Face model directory holds (tokenizer.json, tokenizer_config.json, chat_template.jinja,
generation_config.json) and gives the ids that `AutoTokenizer.apply_chat_template` gives. transformers itself is not
used: importing it imports torch, and the processes that tokenise have no other use for that.

The template alone decides about the start token: text is encoded without adding special tokens, so it is there once
or not at all.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from psrl.errors import ConfigError

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class ChatTokenizer:
    """Turns messages into ids and ids into text. Immutable after `load`; safe to share between threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: jinja2.Template,
        special_tokens: Mapping[str, str],
        eos_ids: tuple[int, ...],
        template_kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._special_tokens = dict(special_tokens)
        self._template_kwargs = dict(template_kwargs)
        self.eos_ids = eos_ids
        """Ids that end an answer, the tokenizer's own end token first. Never empty."""
        pad = self._special_tokens.get("pad_token")
        pad_id = None if pad is None else tokenizer.token_to_id(pad)
        self.pad_id: int = eos_ids[0] if pad_id is None else pad_id

    @classmethod
    def load(cls, model_dir: str | Path, template_kwargs: Mapping[str, Any] | None = None) -> "ChatTokenizer":
        """Read a model directory. `template_kwargs` are handed to the chat template (data.apply_chat_template_kwargs).

        Raises ConfigError naming the file that is missing or broken.
        """
        directory = Path(model_dir)
        if not directory.is_dir():
            raise ConfigError(f"model directory {directory} does not exist: check train_actor_rollout_ref.model.path")
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"model directory {directory} has no tokenizer: tokenizer.json is missing. Copy it from the model's "
                f"source, or write it with AutoTokenizer.from_pretrained(...).save_pretrained({str(directory)!r})"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        settings = _read_json(directory / "tokenizer_config.json", required=True)
        special_tokens = _special_tokens(settings)
        return cls(
            tokenizer,
            _compile(_template_source(directory, settings), directory),
            special_tokens,
            _eos_ids(directory, tokenizer, special_tokens),
            template_kwargs or {},
        )

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size), added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation up to where the answer starts. Raises jinja2.TemplateError if the template
        refuses it."""
        return self._template.render(
            **{
                "tools": None,
                "documents": None,
                **self._special_tokens,
                **self._template_kwargs,
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a templated conversation with its generation prompt. Raises jinja2.TemplateError."""
        return self.encode(self.render(messages))

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands; no special token is added, those in the text count as such."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of these ids; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def _read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ConfigError(f"model directory {path.parent} is incomplete: {path.name} is missing")
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names that templates use, as plain strings; a token may stand as a string or as an object with `content`."""
    found = {}
    for name in _SPECIAL_NAMES:
        value = settings.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_ids(directory: Path, tokenizer: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    ids: list[int] = []
    eos = special_tokens.get("eos_token")
    if eos is not None:
        eos_id = tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ConfigError(f"{directory / 'tokenizer_config.json'}: eos_token {eos!r} is not in the vocabulary")
        ids.append(eos_id)
    for name in ("generation_config.json", "config.json"):
        stated = _read_json(directory / name).get("eos_token_id")
        if stated is not None:
            ids += stated if isinstance(stated, list) else [stated]
            break  # generation_config.json is the authority where it says anything
    if not ids:
        raise ConfigError(
            f"model directory {directory} names no end token: set eos_token in tokenizer_config.json "
            "or eos_token_id in generation_config.json"
        )
    return tuple(dict.fromkeys(ids))


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"model directory {directory} has no chat template: give it a chat_template.jinja, "
            "or use an instruction-tuned model"
        )
    return template


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training masks; here it only passes its content on."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str, directory: Path) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    # A few templates print today's date. It is theirs to ask: no decision of ours hangs on it.
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template of {directory} is not valid: line {error.lineno}: {error.message}"
        ) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
