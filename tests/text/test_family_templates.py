"""The prompts of families whose checkpoints may come without a template."""

from __future__ import annotations

from typing import Any

import pytest

from server.request import Conversation, Message, ToolCall
from server.text.chat_template import ChatTemplate
from server.text.family_templates import family_template
from server.text.tokenizer import Tokenizer

SYSTEM = "<|im_start|>system\nYou are MiMo, a helpful AI assistant engineered by Xiaomi.<|im_end|>"


def prompt(tokenizer: Tokenizer, family: str, *messages: Message, **arguments: Any) -> str:
    source = family_template(family)
    assert source is not None
    conversation = Conversation(messages=messages, template_kwargs=arguments)
    return ChatTemplate(source, tokenizer).render(conversation).text


def user(text: str) -> Message:
    return Message(role="user", texts=(text,))


def test_gemma3_begins_with_bos_and_puts_the_system_text_before_the_first_user_turn(gemma3: Tokenizer) -> None:
    turns = (Message(role="system", texts=("Be brief.",)), user(" Hi "), Message(role="assistant", texts=("Hello",)))
    assert prompt(gemma3, "gemma3", *turns, user("Bye")) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )


def test_gemma3_markers_are_control_tokens(gemma3: Tokenizer) -> None:
    source = family_template("gemma3_text")
    assert source is not None
    ids = ChatTemplate(source, gemma3).encode(Conversation(messages=(user("Hi"),)))
    assert ids == [2, 105, 2364, 107, 10979, 106, 107, 105, 4368, 107]


@pytest.mark.parametrize(
    ("family", "arguments", "end"),
    [
        ("mimo_v2", {}, ""),
        ("mimo_v2", {"enable_thinking": False}, "<think></think>"),
        ("mimo_v2_flash", {}, "<think></think>"),
        ("mimo_v2_flash", {"enable_thinking": True}, ""),
    ],
)
def test_mimo_opens_the_turn_with_thinking_on_or_off(
    smollm2: Tokenizer, family: str, arguments: dict[str, Any], end: str
) -> None:
    expected = SYSTEM + "<|im_start|>user\nHello<|im_end|><|im_start|>assistant\n" + end
    assert prompt(smollm2, family, user("Hello"), **arguments) == expected


def test_mimo_keeps_the_reasoning_of_all_turns_or_only_of_those_after_the_last_user_turn(smollm2: Tokenizer) -> None:
    turns = (
        user("again"),
        Message(role="assistant", texts=("A",), reasoning="old"),
        user("again"),
        Message(role="assistant", texts=("<think>new</think>B",)),
        Message(role="tool", texts=("T",)),
    )
    kept = prompt(smollm2, "mimo_v2", *turns)
    assert "<|im_start|>assistant\n<think>old</think>A<|im_end|>" in kept
    assert "<|im_start|>assistant\n<think>new</think>B<|im_end|>" in kept
    cut = prompt(smollm2, "mimo_v2", *turns, keep_all_reasoning=False)
    assert "<|im_start|>assistant\n<think></think>A<|im_end|>" in cut
    assert "<|im_start|>assistant\n<think>new</think>B<|im_end|>" in cut


def test_mimo_writes_calls_back_to_back_and_consecutive_results_in_one_turn(smollm2: Tokenizer) -> None:
    calls = tuple(ToolCall(id=str(n), name="f", arguments='{"a": " x\\ny", "b": [1]}') for n in range(2))
    text = prompt(
        smollm2,
        "mimo_v2",
        Message(role="system", texts=("S",)),
        user("Hi"),
        Message(role="assistant", tool_calls=calls),
        Message(role="tool", texts=("r1",), tool_call_id="0"),
        Message(role="tool", texts=("r2",), tool_call_id="1"),
    )
    parameters = "<parameter=a> x\ny</parameter>\n<parameter=b>[1]</parameter>\n"
    call = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    assert text == (
        "<|im_start|>system\nS<|im_end|><|im_start|>user\nHi<|im_end|>"
        f"<|im_start|>assistant\n<think></think>{call}{call}<|im_end|>"
        "<|im_start|>tool\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>\n<|im_end|>"
        "<|im_start|>assistant\n"
    )


def test_other_families_have_none() -> None:
    assert family_template("llama") is None
