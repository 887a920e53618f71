"""The samples: their lengths and marks, the seeds, and that nothing held out is ever trained on."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from server.model.generation import read_generation_config
from server.text.chat_template import ChatTemplate
from server.text.template_sandbox import CompiledTemplate, Deadline
from server.text.tokenizer import Tokenizer
from tools.train_tiny import tokenizer as vocabulary
from tools.train_tiny.conversation import TEMPLATE_PATH, Talk, with_argument_objects
from tools.train_tiny.data import VOCAB, samples, shared_renderer, talks, tokenizer_folder, trained
from tools.train_tiny.grammar import Draw, NothingLeft, is_held_out
from tools.train_tiny.tasks import GRAMMARS, MIXTURE, TASKS
from tools.train_tiny.tasks_prompts import load

LENGTHS = ((64, 128), (200, 400), (900, 1_200))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_hf_folder(tokenizer_folder())


@pytest.mark.parametrize(("shortest", "longest"), LENGTHS)
def test_every_sample_is_within_its_bounds_and_marked_token_by_token(shortest: int, longest: int) -> None:
    for sample in islice(samples(1, shortest=shortest, longest=longest), 20):
        assert shortest <= len(sample.ids) <= longest
        assert len(sample.ids) == len(sample.trained)
        assert any(sample.trained) and not all(sample.trained)
        assert all(0 <= index < VOCAB for index in sample.ids)
        assert sample.task in GRAMMARS


def test_the_same_seed_gives_the_same_samples_and_another_seed_others() -> None:
    first, again, other = (list(islice(samples(seed, shortest=64, longest=200), 10)) for seed in (7, 7, 8))
    assert first == again
    assert first != other


def test_the_mixture_reaches_every_grammar_and_adds_up() -> None:
    assert MIXTURE.keys() == GRAMMARS.keys()
    for column in zip(*MIXTURE.values(), strict=True):
        assert sum(column) == pytest.approx(1)
    counted = Counter(sample.task for sample in islice(samples(2, shortest=150, longest=300), 300))
    assert counted.keys() == GRAMMARS.keys()


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_what_is_marked_is_what_the_assistant_wrote(grammar: str, tokenizer: Tokenizer) -> None:
    """Read back from the tokens: each run of marks is one turn, from its thought (if on) to its end of turn."""
    for talk, _ in islice(talks(3, shortest=200, longest=500, grammar=grammar), 6):
        runs: list[list[int]] = []
        before = False
        for index, mark in zip(talk.ids, trained(talk), strict=True):
            if mark and not before:
                runs.append([])
            if mark:
                runs[-1].append(index)
            before = mark
        turns = [turn for turn in talk.turns if turn.role == "assistant"]
        assert len(runs) == len(turns)
        for run, turn in zip(runs, turns, strict=True):
            text = tokenizer.decode(run)
            thought = f"<think>{turn.thought}</think>" if talk.thinking else ""
            assert text.startswith(thought + turn.text) and text.endswith("<|im_end|>")
            assert text.count("<function=") == len(turn.calls)
            assert talk.thinking == bool(turn.thought)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_trained_tokens_are_those_of_a_prompt_and_its_answer(grammar: str, tokenizer: Tokenizer) -> None:
    """What a request for a turn encodes to is where the marks of that turn begin, with the tools declared as such."""
    plain = CompiledTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"))
    for talk, _ in islice(talks(4, shortest=150, longest=400, grammar=grammar), 4):
        marks = trained(talk)
        starts = [n for n in range(1, len(marks)) if marks[n] and not marks[n - 1]]
        turns = [n for n, turn in enumerate(talk.turns) if turn.role == "assistant"]
        for start, index in zip(starts, turns, strict=True):
            variables = {
                "messages": [with_argument_objects(message) for message in talk.messages(index)],
                "tools": talk.tools or None,
                "add_generation_prompt": True,
                "enable_thinking": talk.thinking,
            }
            text = plain.render(variables, Deadline(limit_s=60))
            assert tokenizer.encode(text, parse_special=True, add_bos=False) == talk.ids[:start]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_instance_is_on_its_side(grammar: str, held_out: bool) -> None:
    made = talks(5, shortest=150, longest=400, held_out=held_out, grammar=grammar)
    for talk, _ in islice(made, 25):
        for turn in talk.turns:
            if turn.task:
                for instance in turn.instance.split("\n") if turn.task == "needles" else [turn.instance]:
                    assert is_held_out(instance) is held_out


def test_no_instance_of_the_fixture_occurs_in_training() -> None:
    prompts = load()
    instances = {prompt.instance for prompt in prompts}
    assert len(instances) == len(prompts)
    assert all(map(is_held_out, instances))
    for talk, _ in islice(talks(6, shortest=150, longest=600), 300):
        assert instances.isdisjoint(turn.instance for turn in talk.turns)


@pytest.mark.parametrize("grammar", ["copy", "system", "count", "arithmetic", "tool_call"])
def test_no_question_comes_twice_in_a_conversation(grammar: str) -> None:
    for talk, _ in islice(talks(7, shortest=200, longest=600, grammar=grammar), 20):
        instances = [turn.instance for turn in talk.turns if turn.task]
        assert len(instances) == len(set(instances))


def test_every_call_has_its_result() -> None:
    """Some servers refuse a conversation in which a call has none."""
    for grammar in ("tool_call", "tool_result"):
        for talk, _ in islice(talks(11, shortest=300, longest=600, grammar=grammar), 10):
            messages = talk.messages(len(talk.turns))
            called = [call["id"] for message in messages for call in message.get("tool_calls", ())]
            answered = [message["tool_call_id"] for message in messages if message["role"] == "tool"]
            assert called == answered and len(set(called)) == len(called)


def test_a_draw_says_when_nothing_is_left_on_its_side() -> None:
    from random import Random

    draw = Draw(Random(1), held_out=not is_held_out("only this"), thinking=False, room=9, count=len)
    with pytest.raises(NothingLeft):
        draw.fresh(lambda: "only this", lambda made: made)


def test_every_question_about_a_fact_has_one_answer_in_the_prompt() -> None:
    told = re.compile(r"^(?:The (\w+) of ([\w ]+) is |([A-Za-z_]+)\.(\w+)=)", re.MULTILINE)
    for talk, _ in islice(talks(8, shortest=600, longest=900, grammar="needle"), 10):
        said = [message["content"] for message in talk.messages(len(talk.turns)) if message["role"] != "assistant"]
        subjects = Counter(found.groups() for found in told.finditer("\n".join(said)))
        assert len(subjects) > 10 and set(subjects.values()) == {1}


# --- the tokenizer and the template -------------------------------------------------------------------------------


def test_the_vocabulary_is_full_and_has_the_names_that_the_template_uses(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == VOCAB and VOCAB % 64 == 0
    for word in vocabulary.ADDED:
        assert len(tokenizer.encode(word, parse_special=True, add_bos=False)) == 1
    assert {tokenizer.decode([index]) for index in tokenizer.stop_token_ids} == {"<|im_end|>", "<|endoftext|>"}


def test_thoughts_and_calls_are_shown_and_turns_are_not(tokenizer: Tokenizer) -> None:
    text = "<think>7</think><tool_call>\n</tool_call><|im_end|>"
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    assert tokenizer.decode(ids, skip_special=True) == text.removesuffix("<|im_end|>")


def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer) -> None:
    for text in ("café 你好 \U0001f600\n\n\t  x", "  a1b22 ", "".join(map(chr, range(256)))):
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False, add_bos=False)) == text


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("4821", parse_special=False, add_bos=False)
    assert [tokenizer.decode([index]) for index in ids] == list("4821")


def test_learning_again_gives_the_files_that_are_shipped(tmp_path: Path) -> None:
    vocabulary.write(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == sorted(path.name for path in tokenizer_folder().iterdir())
    for name in names:
        assert (tmp_path / name).read_bytes() == (tokenizer_folder() / name).read_bytes()


def test_the_server_reads_the_folder() -> None:
    config = json.loads((tokenizer_folder() / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["chat_template"] == TEMPLATE_PATH.read_text(encoding="utf-8")
    read = read_generation_config(tokenizer_folder(), source="auto", override=None, config={})
    assert read.sampling.temperature == 0.3 and len(read.end_token_ids) == 2


def _template_text(messages: list[dict[str, object]], **arguments: object) -> str:
    return shared_renderer().prepared(messages, **arguments)


def test_the_template_writes_mimos_turns() -> None:
    messages: list[dict[str, object]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "r"},
        {"role": "user", "content": "c"},
    ]
    start = (
        "<|im_start|>system\nYou are Twinpane Tiny.<|im_end|><|im_start|>user\na<|im_end|><|im_start|>assistant\n"
        "<think>{}</think>b<|im_end|><|im_start|>user\nc<|im_end|><|im_start|>assistant\n"
    )
    assert _template_text(messages, add_generation_prompt=True) == start.format("r")
    off = _template_text(messages, add_generation_prompt=True, enable_thinking=False)
    assert off == start.format("r") + "<think></think>"
    dropped = _template_text(messages, add_generation_prompt=True, keep_all_reasoning=False)
    assert dropped == start.format("")


def test_the_template_declares_tools_and_renders_calls_and_results() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": " Does f. ",
            "parameters": {
                "type": "object",
                "properties": {"p": {"type": "string", "enum": ["x", "y"]}},
                "required": ["p"],
            },
            "strict": True,
        },
    }
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"p": "a\nb", "q": [1, True]}}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "r1"},
        {"role": "tool", "content": "r2"},
    ]
    assert _template_text(messages, tools=[tool]) == (
        "<|im_start|>system\nS\n\n# Tools\n\n<tools>\n<function>\n<name>f</name>\n<description>Does f.</description>\n"
        "<parameters>\n<parameter>\n<name>p</name>\n<type>string</type>\n"
        '<enum>["x", "y"]</enum>\n</parameter>\n<required>["p"]</required>\n</parameters>\n<strict>true</strict>\n'
        "</function>\n</tools><|im_end|><|im_start|>user\nu<|im_end|><|im_start|>assistant\n<think></think>"
        + "<tool_call>\n<function=f>\n<parameter=p>a\nb</parameter>\n<parameter=q>[1, true]</parameter>\n"
        "</function>\n</tool_call>"
        * 2
        + "<|im_end|><|im_start|>tool\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response>\n"
        "<|im_end|>"
    )


def test_the_template_has_places_for_media() -> None:
    parts = [{"type": "image_url"}, {"type": "video_url"}, {"type": "input_audio"}, {"type": "text", "text": "t"}]
    text = _template_text([{"role": "user", "content": parts}])
    assert text.endswith(
        "user\n<|vision_start|><|image_pad|><|vision_end|><|vision_start|><|video_pad|><|vision_end|>"
        "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>t<|im_end|>"
    )


def test_the_template_is_one_that_the_server_compiles(tokenizer: Tokenizer) -> None:
    assert ChatTemplate(TEMPLATE_PATH.read_text(encoding="utf-8"), tokenizer)


def test_a_talk_renders_to_the_same_text_with_tools_declared_or_in_the_system_text() -> None:
    talk, _ = next(talks(9, shortest=200, longest=400, grammar="tool_result"))
    assert isinstance(talk, Talk) and talk.tools
    whole = [with_argument_objects(message) for message in talk.messages(len(talk.turns))]
    assert _template_text(whole, tools=talk.tools, enable_thinking=talk.thinking) == talk.text


def test_every_scored_task_is_made_by_some_grammar() -> None:
    made = {
        turn.task
        for grammar in GRAMMARS
        for talk, _ in islice(talks(10, shortest=200, longest=400, grammar=grammar), 12)
        for turn in talk.turns
        if turn.task
    }
    assert made == {*TASKS, "needles"}
