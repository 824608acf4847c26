"""Chat templates: one beginning-of-text token, later turns behind the exact ids sampled, tool calls as the template writes."""

from __future__ import annotations

import pytest
from tokenizers import Regex, models, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from async_rl.environments.session import ToolCall
from async_rl.errors import DataError
from async_rl.rollout.chat import FORMATS, Chat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def character_tokenizer(template: str, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """One token per character, and the special ones."""
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<unk>"]
    characters = sorted({chr(code) for code in range(32, 127)} | {"\n"})
    vocabulary = {token: index for index, token in enumerate([*special, *characters])}
    core = RustTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        additional_special_tokens=special[1:2],
    )
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_prompt_begins_with_one_bos_at_most(template: str, adds_bos: bool) -> None:
    tokenizer = character_tokenizer(template, adds_bos=adds_bos)
    chat = Chat(tokenizer, [2])
    rendered = chat.opening_ids(({"role": "user", "content": "hi"},))
    raw, twice = chat.opening_ids("hi"), chat.opening_ids("<s>hi")
    expected = 1 if adds_bos else template.count("bos_token")
    assert rendered.count(0) == expected
    assert raw.count(0) == int(adds_bos)
    assert twice.count(0) == 1


def test_what_follows_a_turn_is_what_the_template_puts_there() -> None:
    tokenizer = character_tokenizer(CHATML)
    chat = Chat(tokenizer, [2])
    said = ({"role": "tool", "content": "42"},)
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, *said],
        tokenize=False,
        add_generation_prompt=True,
    )
    before = chat.opening_ids(({"role": "user", "content": "q"},))
    for sampled in ([*tokenizer.encode("a", add_special_tokens=False), 2], tokenizer.encode("a", add_special_tokens=False)):
        ids = [*before, *sampled, *chat.reply_ids(said, last_id=sampled[-1])]
        assert ids == tokenizer.encode(whole, add_special_tokens=False)


def test_tool_calls_are_read_in_the_format_that_the_template_writes() -> None:
    chat = Chat(character_tokenizer(CHATML), [2])
    raw = 'I ask. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"name": oops}</tool_call><|im_end|>'
    good, bad = chat.tool_calls(raw)
    assert good == ToolCall("add", {"a": 1})
    assert bad.error is not None
    assert bad.error.startswith("not JSON")
    assert chat.tool_calls("no call") == ()


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("tagged", '<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'),
        ("listed", '[TOOL_CALLS][{"name": "f", "arguments": {"x": [1]}}]</s>'),
        ("listed", '[TOOL_CALLS] [{"name": "f", "arguments": "{\\"x\\": [1]}"}]'),
        ("bare", '<|python_tag|>{"name": "f", "parameters": {"x": [1]}}<|eot_id|>'),
        ("bare", '{"type": "function", "name": "f", "parameters": {"x": [1]}}'),
    ],
)
def test_every_known_format(name: str, raw: str) -> None:
    assert FORMATS[name](raw) == (ToolCall("f", {"x": [1]}),)


def test_a_template_without_tool_calls_is_refused_when_one_is_needed() -> None:
    with pytest.raises(DataError, match="writes tool calls in no format that is known"):
        Chat(character_tokenizer(WITHOUT_BOS), [2]).tool_calls("x")
