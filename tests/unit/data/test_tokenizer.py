"""Our tokenizer against transformers' on the same directory, and what it says when files are missing."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from psrl.data import ChatTokenizer
from psrl.data.models.tiny import make_tokenizer, vocabulary
from psrl.errors import ConfigError

CONVERSATIONS = [
    [{"role": "user", "content": "Tom has 5 pens. He buys 9 and loses 3. How many pens?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hatstand  into 1234 #### 5\n\n é 漢字"}],
    [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": " \n <eos> {{ 7 }}"},
    ],
]


def same_as_transformers(directory: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(directory), ChatTokenizer.load(directory)
    for messages in CONVERSATIONS:
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.render(messages) == text
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        assert ours.encode_prompt(messages) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_ids[0] == theirs.eos_token_id
    assert ours.pad_id == theirs.pad_token_id
    assert ours.vocab_size == len(theirs)


def test_tiny_equals_transformers(tmp_path: Path) -> None:
    from psrl.data.models import tiny

    same_as_transformers(tiny(tmp_path / "tiny"))


@pytest.mark.timeout(900)  # the model may be made first
def test_smollm2_equals_transformers(smollm2_dir: Path) -> None:
    same_as_transformers(smollm2_dir)


def test_no_torch_is_imported(tokenizer_dir: Path) -> None:
    code = (
        "import sys, psrl.data, psrl.data.prepare, psrl.data.models, psrl.reward\n"
        f"psrl.data.ChatTokenizer.load({str(tokenizer_dir)!r}).encode_prompt([dict(role='user', content='5')])\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=110)
    assert answer.stdout.strip() == "[]"


@settings(deadline=None)
@given(st.text(alphabet="".join(token for token in vocabulary()[2:] if len(token) == 1)))
def test_tiny_text_survives(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < 115 for index in ids)


def test_tiny_has_115_tokens_and_single_digits(tokenizer: ChatTokenizer) -> None:
    assert len(set(vocabulary())) == 115 == tokenizer.vocab_size
    assert [tokenizer.decode([index]) for index in tokenizer.encode("#### 17")] == ["#### ", "1", "7"]
    assert tokenizer.render(CONVERSATIONS[0]) == "Tom has 5 pens. He buys 9 and loses 3. How many pens?\n"
    assert len(tokenizer.encode_prompt(CONVERSATIONS[0])) == 20


@pytest.fixture
def llama_like(tmp_path: Path) -> Callable[..., Path]:
    """A tokenizer that adds <s> by itself, under a template that writes it too."""

    def make(template: str = "{{ bos_token }}{{ messages[0].content }}", **settings: Any) -> Path:
        words = {"<s>": 0, "</s>": 1, "<end>": 2, "a": 3, "b": 4}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": template} | settings
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return make


def test_the_start_token_is_there_once(llama_like: Callable[..., Path]) -> None:
    assert ChatTokenizer.load(llama_like()).encode_prompt([{"role": "user", "content": "a b"}]) == [0, 3, 4]


def test_several_end_tokens(llama_like: Callable[..., Path]) -> None:
    directory = llama_like()
    assert ChatTokenizer.load(directory).eos_ids == (1,)
    assert ChatTokenizer.load(directory).pad_id == 1
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    assert ChatTokenizer.load(directory).eos_ids == (1, 2)


def test_template_arguments_and_named_templates(llama_like: Callable[..., Path]) -> None:
    named = [{"name": "default", "template": "{{ 'a' if think else 'b' }}"}, {"name": "tool_use", "template": "x"}]
    directory = llama_like(chat_template=named)
    assert ChatTokenizer.load(directory, {"think": True}).render([]) == "a"
    assert ChatTokenizer.load(directory).render([]) == "b"


def test_templates_cannot_reach_out(llama_like: Callable[..., Path]) -> None:
    import jinja2

    directory = llama_like("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(jinja2.TemplateError):
        ChatTokenizer.load(directory).render([])


def test_missing_and_broken_files_are_named(llama_like: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist: check train_actor_rollout_ref.model.path"):
        ChatTokenizer.load(tmp_path / "absent")
    directory = llama_like()
    originals = {name: (directory / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}
    faults: list[tuple[str, str | None, str]] = [
        ("tokenizer.json", None, "has no tokenizer: tokenizer.json is missing"),
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", None, "tokenizer_config.json is missing"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', "has no chat template"),
        ("tokenizer_config.json", '{"chat_template": "x"}', "names no end token"),
        ("tokenizer_config.json", '{"chat_template": "x", "eos_token": "<none>"}', "'<none>' is not in the vocabulary"),
        (
            "tokenizer_config.json",
            '{"chat_template": "{% if %}", "eos_token": "</s>"}',
            "chat template .* is not valid",
        ),
    ]
    for name, content, said in faults:
        for original, text in originals.items():
            (directory / original).write_text(text)
        if content is None:
            (directory / name).unlink()
        else:
            (directory / name).write_text(content)
        with pytest.raises(ConfigError, match=said):
            ChatTokenizer.load(directory)
