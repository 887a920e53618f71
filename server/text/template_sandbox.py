"""Running a chat template that came with a model: jinja2's immutable sandbox, with an end to time and memory.

A template is a program. Loops and calls check a deadline (both are instrumented, so no thread has to be killed and the
sandbox works on any thread), and what makes something huge from something small in one step checks sizes or is left
out. This is for mistakes and for arguments from clients; a hostile template can still spend memory, for example by
replacing every letter of a long text with a long text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from server.text.control_spellings import unhurried
from server.text.guard import RESERVED

MAX_CHARS = 64_000_000
_MAX_REPEATED = 1_000_000
_MAX_INT_BITS = 4_096
_MAX_INDENT = 16
_MAX_WIDTH = 1_000
_DEADLINE = " deadline"  # no template can name a variable with a blank
_LOOP, _SIZED = " loop", " sized"
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4,}|\*)")
_WIDE_FIELD = re.compile(r"\{[^}]*:[^}]*(\d{4,}|\{)")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_ESCAPED_MARK = re.compile(rf"(?<!\\)((?:\\\\)*)\\u({'|'.join(f'{ord(mark):04x}' for mark in RESERVED)})")


class TemplateTimeout(Exception):
    """Rendering took longer than it may."""


class Deadline:
    """A point on a monotonic clock, in seconds. `check` raises TemplateTimeout behind it, or what `before` raises."""

    def __init__(
        self,
        *,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        before: Callable[[], None] = unhurried,
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._end_s = clock() + limit_s
        self._before = before

    def check(self) -> None:
        self._before()
        if self._clock() > self._end_s:
            raise TemplateTimeout(f"rendering took longer than {self._limit_s:g} s")


class CompiledTemplate:
    """A template, compiled once. Immutable; renders on any thread, on several at a time.

    `now` is what `strftime_now` tells. Raises jinja2.TemplateSyntaxError if the source is no template, and ValueError
    if it contains one of the characters kept for marks.
    """

    def __init__(self, source: str, *, now: Callable[[], datetime] = datetime.now) -> None:
        if any(mark in source for mark in RESERVED):
            raise ValueError("it contains a noncharacter (U+FDD0 to U+FDD2)")
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.filters.update({"tojson": _tojson, "format": _format, _LOOP: _each, _SIZED: _sized})
        for name in ("center", "indent"):
            environment.filters[name] = _narrow(environment.filters[name])
        for name in ("batch", "slice"):
            del environment.filters[name]
        del environment.globals["lipsum"]
        environment.globals.update(raise_exception=_raise_exception, strftime_now=lambda form: now().strftime(form))
        tree = _Instrumented().visit(environment.parse(source))
        code = environment.compile(tree, filename="<chat template>")
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, Any], deadline: Deadline) -> str:
        """Render. Raises whatever the template raises (jinja2 errors, TypeError, ...), and TemplateTimeout."""
        pieces: list[str] = []
        chars = 0
        for piece in self._template.generate({**variables, _DEADLINE: deadline}):
            deadline.check()
            pieces.append(piece)
            chars += len(piece)
            if chars > MAX_CHARS:
                raise SecurityError(f"it writes more than {MAX_CHARS} characters")
        return "".join(pieces)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __context[_DEADLINE].check()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _refuse_huge(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        text = getattr(value, "__self__", None)
        if isinstance(text, str) and value.__name__ in {"format", "format_map"} and _WIDE_FIELD.search(text):
            raise SecurityError("a field of the format string is too wide")
        return super().wrap_str_format(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in _PADDING) and super().is_safe_attribute(obj, attr, value)


def _refuse_huge(operator: str, left: Any, right: Any) -> None:
    """Raise SecurityError if the result would be far larger than any prompt needs."""
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    counts = [side for side in (left, right) if isinstance(side, int)]
    if operator == "+":
        huge = sum(sizes) > MAX_CHARS
    elif operator == "%":
        huge = isinstance(left, str) and _WIDE_FORMAT.search(left) is not None
    elif sizes:
        huge = any(size * count > _MAX_REPEATED for size in sizes for count in counts)
    elif operator == "**":
        huge = len(counts) == 2 and counts[0].bit_length() * abs(counts[1]) > _MAX_INT_BITS
    else:
        huge = sum(count.bit_length() for count in counts) > _MAX_INT_BITS
    if huge:
        raise SecurityError(f"the result of {operator!r} would be too large")


class _Instrumented(NodeTransformer):
    """Puts every loop under the deadline, and every `~` under the size limit."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOP)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _SIZED)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


@pass_context
def _each(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    deadline: Deadline = context[_DEADLINE]
    for item in items:
        deadline.check()
        yield item


@pass_context
def _sized(context: Context, text: str) -> str:  # with a context, so that constants are not folded past the check
    if len(text) > MAX_CHARS:
        raise SecurityError(f"a text has more than {MAX_CHARS} characters")
    return text


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` tells trainers what the model wrote; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 the form jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _refuse_huge("%", str(text), None)
    return str(text) % (kwargs or args)


def _narrow(pad: Callable[..., str]) -> Callable[..., str]:
    """A filter that pads, for widths that fit a prompt."""

    def narrow(text: str, width: Any = 4, *args: Any, **kwargs: Any) -> str:
        if not isinstance(width, int) or width > _MAX_WIDTH:
            raise SecurityError(f"a width is at most {_MAX_WIDTH}")
        return pad(text, width, *args, **kwargs)

    return narrow


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as model templates expect it. Marks stay marks when the rest becomes ASCII."""
    if indent is not None and not 0 <= int(indent) <= _MAX_INDENT:
        raise SecurityError(f"tojson indents by 0 to {_MAX_INDENT}, not {indent}")
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_MARK.sub(lambda found: found[1] + chr(int(found[2], 16)), text) if ensure_ascii else text
