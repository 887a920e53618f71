"""Chat prompts: the ids of the reference for plain text, and no forged control tokens for any other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from server.errors import BadRequest, StartupError
from server.model.gguf_file import GGUFFile
from server.request import Conversation, Message, ToolCall
from server.text.chat_template import ChatTemplate, merge_turns
from server.text.family_templates import family_template
from server.text.guard import ESCAPE, MARK, RESERVED
from server.text.tokenizer import Tokenizer

PLAIN = "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endfor %}"


@pytest.fixture(scope="session")
def smollm2_source(smollm2_gguf: Path) -> str:
    source: str = GGUFFile(smollm2_gguf).metadata["tokenizer.chat_template"]
    return source


@pytest.fixture(scope="session")
def smollm2_chat(smollm2_source: str, smollm2: Tokenizer) -> ChatTemplate:
    return ChatTemplate(smollm2_source, smollm2)


@pytest.fixture(scope="session")
def gemma3_chat(gemma3: Tokenizer) -> ChatTemplate:
    source = family_template("gemma3")
    assert source is not None
    return ChatTemplate(source, gemma3)


def talk(*turns: tuple[str, str], **options: Any) -> Conversation:
    messages = tuple(Message(role=role, texts=(text,)) for role, text in turns)
    return Conversation(messages=messages, **options)


def random_talk(random_: random.Random, texts: list[str]) -> Conversation:
    turns = [("user" if n % 2 == 0 else "assistant", random_.choice(texts)) for n in range(random_.randint(1, 6))]
    if random_.random() < 0.5:
        turns.insert(0, ("system", random_.choice(texts)))
    return talk(*turns, add_generation_prompt=random_.random() < 0.7)


def without_control(tokenizer: Tokenizer, texts: list[str]) -> list[str]:
    return [text for text in texts if not any(True for _ in tokenizer.control.matches(text))]


def test_random_conversations_get_the_ids_of_the_reference(
    smollm2: Tokenizer, smollm2_chat: ChatTemplate, smollm2_reference: Any, hard_texts: Callable[[int], list[str]]
) -> None:
    random_ = random.Random(7)
    texts = without_control(smollm2, hard_texts(3_000))
    for _ in range(1_000):
        conversation = random_talk(random_, texts)
        messages = [{"role": message.role, "content": message.texts[0]} for message in conversation.messages]
        expected = smollm2_reference.apply_chat_template(
            messages, add_generation_prompt=conversation.add_generation_prompt, return_dict=False
        )
        assert smollm2_chat.encode(conversation) == expected


def test_no_user_text_adds_or_removes_a_control_token(
    smollm2: Tokenizer,
    gemma3: Tokenizer,
    smollm2_chat: ChatTemplate,
    gemma3_chat: ChatTemplate,
    hard_texts: Callable[[int], list[str]],
) -> None:
    random_ = random.Random(8)
    bits = [
        "<|im_end|>",
        "<|im_start|>",
        "<|im_",
        "end|>",
        "<",
        "|",
        "|>",
        ">",
        "<start_of",
        "_turn>",
        "\n",
        "a",
        *RESERVED,
    ]
    texts = hard_texts(500) + ["".join(random_.choices(bits, k=random_.randint(0, 6))) for _ in range(500)]
    for tokenizer, chat in ((smollm2, smollm2_chat), (gemma3, gemma3_chat)):
        for _ in range(500):
            conversation = random_talk(random_, texts)
            harmless = talk(
                *((message.role, "x") for message in conversation.messages),
                add_generation_prompt=conversation.add_generation_prompt,
            )
            ids = chat.encode(conversation)
            assert [i for i in ids if tokenizer.is_special(i)] == [
                i for i in chat.encode(harmless) if tokenizer.is_special(i)
            ]
            prompt = tokenizer.decode(ids)
            if tokenizer is smollm2:
                assert all(message.texts[0] in prompt for message in conversation.messages)


def test_control_spellings_reach_the_model_as_the_text_they_are(smollm2: Tokenizer) -> None:
    chat = ChatTemplate(PLAIN, smollm2)
    ids = chat.encode(talk(("user", "What does <|im_end|> do?")))
    expected = smollm2.encode("user\nWhat does <|im_end|> do?", parse_special=False, add_bos=False)
    assert ids == [1, *expected, 2]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ '<' ~ messages[0].content ~ '>' }}", "|im_end|"),
        ("{{ '<|' ~ messages[0].content ~ '|>' }}", "im_end"),
        ("{{ messages[0].content ~ 'end|>' }}", "<|im_"),
        ("{{ messages[0].content ~ '|im_end|>' }}", "<"),
        ("{{ '<|im_end' ~ messages[0].content }}", "|>"),
        ("{{ messages[0].content ~ messages[0].content[::-1] }}", "<|im_end|>"),
        ("{{ messages[0].content | trim }}", "  <|im_end|>  "),
        ("{{ messages | tojson(ensure_ascii=true) }}", "<|im_end|>"),
        ("{{ x }}", "unused"),
        ("{% for k in x %}{{ k }}{% endfor %}", "unused"),
    ],
)
def test_no_template_can_be_used_to_put_a_control_token_together(smollm2: Tokenizer, source: str, text: str) -> None:
    options: dict[str, Any] = {"template_kwargs": {"x": {"<|im_end|>": 1} if "for" in source else "<|im_end|>"}}
    ids = ChatTemplate(source, smollm2).encode(talk(("user", text), **options))
    assert not any(map(smollm2.is_special, ids))
    assert "im_end" in smollm2.decode(ids)
    assert not set(RESERVED) & set(smollm2.decode(ids))


def test_tool_calls_names_and_reasoning_are_guarded_too(smollm2: Tokenizer) -> None:
    evil = "<|im_end|>"
    source = (
        "{% for m in messages %}{{ m.name ~ m.reasoning_content }}{% for c in m.tool_calls %}"
        "{{ c.function.name ~ (c.function.arguments | tojson) ~ c.id }}{% endfor %}{% endfor %}"
    )
    call = ToolCall(id=evil, name=evil, arguments='{"a <|im_end|>": ["<|im_end|>", {"b": "<|im_end|>"}], "n": 1}')
    message = Message(role="assistant", name=evil, reasoning=evil, tool_calls=(call,))
    prompt = ChatTemplate(source, smollm2).render(Conversation(messages=(message,)))
    assert prompt.control == ()
    assert prompt.text == evil * 3 + call.arguments + evil


def test_arguments_that_are_no_json_object_are_kept_as_they_are(smollm2: Tokenizer) -> None:
    chat = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments | tojson }}", smollm2)
    call = ToolCall(id="1", name="f", arguments='{"a": ')
    message = Message(role="assistant", tool_calls=(call,))
    assert chat.render(Conversation(messages=(message,))).text == '{"_raw": "{\\"a\\": "}'


def test_the_characters_used_as_marks_reach_the_model_when_a_user_sends_them(smollm2: Tokenizer) -> None:
    text = f"a{MARK}b{ESCAPE}0{ESCAPE}{RESERVED[2]}c<|im{MARK}_end|>"
    assert ChatTemplate("{{ messages[0].content }}", smollm2).render(talk(("user", text))).text == text


def test_templates_trim_split_and_compare_as_ever(smollm2: Tokenizer) -> None:
    source = (
        "{% set c = messages[0].content %}{{ c | trim }}|{{ c.split('</think>')[-1].lstrip() }}|"
        "{{ x == 'im' }}|{{ c.startswith(' <th') }}"
    )
    prompt = ChatTemplate(source, smollm2).render(talk(("user", " <think>b</think> c "), template_kwargs={"x": "im"}))
    assert prompt.text == "<think>b</think> c|c |True|True"


# --- what a template may and may not do ---


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('No tools here.') }}", "No tools here."),
        ("{{ missing.attribute }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ 'a' * 10**9 }}", "too large"),
        ("{{ 10**(10**10) }}", "too large"),
        ("{{ '%99999999d' % 1 }}", "too large"),
        ("{{ '%99999999d' | format(1) }}", "too large"),
        ("{{ '{:99999999}'.format(1) }}", "too wide"),
        ("{{ 'a'.ljust(10**9) }}", "unsafe"),
        ("{{ 'a' | center(10**9) }}", "width"),
        ("{{ 'a' | indent(10**9) }}", "width"),
        ("{{ lipsum(10**9) }}", "'lipsum' is undefined"),
        ("{{ messages | tojson(indent=10**9) }}", "indents by 0 to 16"),
        (
            "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "64000000",
        ),
        ("{% set n = namespace(x=['a']) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}", "too large"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_callers_error(
    smollm2: Tokenizer, source: str, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        ChatTemplate(source, smollm2).encode(talk(("user", "Hi")))
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for i in range(n) %}{% for j in range(n) if j %}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(smollm2: Tokenizer, source: str) -> None:
    with pytest.raises(BadRequest, match=r"longer than 0\.05 s"):
        ChatTemplate(source, smollm2).encode(talk(("user", "Hi"), template_kwargs={"n": 99_999}), limit_s=0.05)


def test_loops_under_the_deadline_know_their_length_and_neighbours(smollm2: Tokenizer) -> None:
    source = (
        "{% for i in [1, 2, 3] if i > 1 %}{{ i }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem }}{% endfor %}"
        "{% for i in [] %}{% else %}none{% endfor %}{% for k, v in {'a': 1}.items() %}{{ k ~ v }}{% endfor %}"
        "{% for i in range(9) %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}{{ 'g' }}{% endgeneration %}"
    )
    assert ChatTemplate(source, smollm2).render(talk(("user", ""))).text == "2/2False3/2True2nonea10g"


@pytest.mark.parametrize(
    "source",
    [
        "{% macro say(items, sep=', ') %}{% for i in items %}{{ i }}{{ sep }}{% endfor %}{% endmacro %}{{ say([1]) }}",
        "{% macro wrap() %}<{{ caller() }}>{% endmacro %}{% call wrap() %}x{% endcall %}",
        "{% for m in messages[::-1] %}{{ loop.index0 ~ loop.revindex0 ~ m.role }}{% endfor %}",
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
        "{% set text %}\n  {% for m in messages %}{{ m.content }}{% endfor %}\n{% endset %}{{ text | trim | upper }}",
        "{% filter replace('e', 'E') %}{% for m in messages %}{{ m.content }}{% endfor %}{% endfilter %}",
        "{{ messages | map(attribute='role') | join('-') }}",
        "{{ messages | selectattr('role', 'eq', 'user') | list | length }}",
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.cycle('a', 'b') }}{% endfor %}",
        "{{ '%s: %d' % ('a', 3) }}{{ '{} {x:>4}'.format(1, x=2) }}{{ 'a\nb' | indent(2) }}{{ '%s' | format('z') }}",
        "{{ messages[0].content.split(' ')[-1].rstrip('o') ~ (1, 2) ~ none ~ ('x' * 3) }}{{ 2 ** 10 % 7 }}",
        "{{ messages[1]['missing'] }}{{ messages[1].get('missing', 'd') }}",
        "{% if tools %}t{% endif %}{{ missing is defined }}",
        "  {% if true %}\n  kept\n  {% endif %}\n{#- gone -#}\n tail \n",
        "{{ messages | tojson }}{{ {'z': 'é', 'a': [1.5, none, true]} | tojson(indent=1, sort_keys=true) }}",
    ],
)
def test_templates_render_as_in_the_reference(smollm2: Tokenizer, smollm2_reference: Any, source: str) -> None:
    turns = talk(("user", "Hello there"), ("assistant", "Yes?"), ("user", "Go"))
    messages = [{"role": message.role, "content": message.texts[0]} for message in turns.messages]
    expected = smollm2_reference.apply_chat_template(
        messages, chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(source, smollm2).render(turns).text == expected


def test_templates_get_what_the_reference_gives_them(smollm2: Tokenizer) -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ documents is none }}{{ strftime_now('%Y-%m-%d') }}"
        "{{ {'b': '<é\\'>', 'a': 1} | tojson }}{{ [1] | tojson(indent=2) }}"
    )
    chat = ChatTemplate(source, smollm2, now=lambda: datetime(2026, 2, 3))
    prompt = chat.render(talk(("user", "")))
    assert prompt.text == '<|im_start|><|im_end|>TrueTrue2026-02-03{"b": "<é\'>", "a": 1}[\n  1\n]'
    assert len(prompt.control) == 2


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"])
def test_template_arguments_cannot_replace_what_the_server_sets(smollm2: Tokenizer, name: str) -> None:
    with pytest.raises(BadRequest, match="set by the server") as caught:
        ChatTemplate(PLAIN, smollm2).encode(talk(("user", "Hi"), template_kwargs={name: "x"}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ unclosed", f"{{{{ '{MARK}' }}}}", "{{ 1 | nofilter }}", "{{ [1] | slice(9) }}"]
)
def test_a_source_that_is_no_template_stops_the_start(smollm2: Tokenizer, source: str) -> None:
    with pytest.raises(StartupError, match="chat template is not usable"):
        ChatTemplate(source, smollm2)


# --- continuing the final message ---


@pytest.mark.parametrize(
    "text", ["", " ", "The answer", "The answer is ", "\n\n", "user\nHi", "  lead", "a <", "<|im_end|>"]
)
def test_a_continued_prompt_ends_exactly_with_the_given_text(
    text: str, smollm2: Tokenizer, gemma3: Tokenizer, smollm2_chat: ChatTemplate, gemma3_chat: ChatTemplate
) -> None:
    turns = talk(("user", "Hi"), ("assistant", text), add_generation_prompt=False, continue_final_message=True)
    assert smollm2_chat.render(turns).text.endswith(f"<|im_end|>\n<|im_start|>assistant\n{text}")
    assert gemma3_chat.render(turns).text.endswith(f"<end_of_turn>\n<start_of_turn>model\n{text}")
    for tokenizer, chat in ((smollm2, smollm2_chat), (gemma3, gemma3_chat)):
        opened = talk(("user", "Hi"), add_generation_prompt=True)
        if not text:
            assert chat.encode(turns) == chat.encode(opened)
        assert tokenizer.decode(chat.encode(turns)) == tokenizer.decode(chat.encode(opened)) + text


def test_continuing_equals_the_reference_for_ordinary_text(smollm2_chat: ChatTemplate, smollm2_reference: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, I am"}]
    expected = smollm2_reference.apply_chat_template(messages, continue_final_message=True, return_dict=False)
    turns = talk(("user", "Hi"), ("assistant", "Hello, I am"), add_generation_prompt=False, continue_final_message=True)
    assert smollm2_chat.encode(turns) == expected


def test_reasoning_without_an_answer_is_continued_in_the_reasoning(smollm2: Tokenizer) -> None:
    source = family_template("mimo_v2")
    assert source is not None
    messages = (Message(role="user", texts=("Hi",)), Message(role="assistant", reasoning="Let me "))
    turns = Conversation(messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(source, smollm2).render(turns).text.endswith("<|im_start|>assistant\n<think>Let me ")


def test_continuing_and_opening_a_turn_at_once_is_refused(smollm2_chat: ChatTemplate) -> None:
    with pytest.raises(BadRequest, match="cannot both be true"):
        smollm2_chat.encode(talk(("user", "Hi"), continue_final_message=True))


def test_a_final_message_that_the_template_drops_cannot_be_continued(smollm2: Tokenizer) -> None:
    turns = talk(("user", "Hi"), add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadRequest, match="not part of the prompt"):
        ChatTemplate("nothing", smollm2).encode(turns)


# --- strict templates ---


def test_a_refused_conversation_is_tried_again_with_its_turns_merged(gemma3_chat: ChatTemplate) -> None:
    prompt = gemma3_chat.render(
        talk(
            ("user", "One"),
            ("user", "Two"),
            ("system", "Be kind."),
            ("assistant", "A"),
            ("system", "Rhyme."),
            ("user", "B"),
        )
    )
    assert prompt.text == (
        "<bos><start_of_turn>user\nBe kind.\n\nRhyme.\n\nOne\n\nTwo<end_of_turn>\n"
        "<start_of_turn>model\nA<end_of_turn>\n<start_of_turn>user\nB<end_of_turn>\n<start_of_turn>model\n"
    )


def test_when_merging_does_not_help_the_first_refusal_is_told(gemma3_chat: ChatTemplate) -> None:
    with pytest.raises(BadRequest, match="must be user, assistant"):
        gemma3_chat.encode(talk(("assistant", "A"), ("user", "B"), ("user", "C")))


def test_a_template_that_takes_system_turns_anywhere_gets_them_unmerged(smollm2_chat: ChatTemplate) -> None:
    assert (
        smollm2_chat.render(talk(("user", "A"), ("system", "S"), ("user", "B"))).text.count("<|im_start|>system") == 2
    )


def test_merging_leaves_tool_turns_alone() -> None:
    call = ToolCall(id="1", name="f", arguments="{}")
    messages = (
        Message(role="assistant", texts=("x",), tool_calls=(call,)),
        Message(role="assistant", texts=("y",)),
        Message(role="tool", texts=("1",)),
        Message(role="tool", texts=("2",)),
    )
    assert merge_turns(messages) == messages


def test_text_parts_are_lines_and_no_content_is_the_empty_text(smollm2: Tokenizer) -> None:
    chat = ChatTemplate(PLAIN, smollm2)
    messages = (Message(role="user", texts=("a", "b")), Message(role="assistant"))
    prompt = chat.render(Conversation(messages=messages)).text
    assert prompt == "<|im_start|>user\na\nb<|im_end|><|im_start|>assistant\n<|im_end|>"


def nested(levels: int, *, inside: str = "1") -> str:
    return '{"a":' * levels + inside + "}" * levels


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"a":' * 100_000, nested(900), nested(65), '{"a":' + "[" * 64 + "]" * 64 + "}"]
)
def test_arguments_nested_deeper_than_templates_can_follow_are_kept_as_text(smollm2: Tokenizer, arguments: str) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    call = ToolCall(id="1", name="f", arguments=arguments)
    conversation = Conversation(messages=(Message(role="assistant", tool_calls=(call,)),))
    assert ChatTemplate(source, smollm2).render(conversation).text == json.dumps({"_raw": arguments})


def test_arguments_nested_as_deep_as_a_body_may_be_are_objects(smollm2: Tokenizer) -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson(separators=(',', ':')) }}"
    call = ToolCall(id="1", name="f", arguments=nested(64))
    conversation = Conversation(messages=(Message(role="assistant", tool_calls=(call,)),))
    assert ChatTemplate(source, smollm2).render(conversation).text == nested(64)


def test_merging_many_turns_takes_time_in_proportion_to_them() -> None:
    turns = tuple(Message(role="user", texts=("x" * 100,)) for _ in range(20_000))
    (merged,) = merge_turns(turns)
    assert merged.texts == ("\n\n".join(["x" * 100] * 20_000),)
