"""How much of anything one call may hold. Lengths are looked at before elements, so that a refusal costs nothing."""

from __future__ import annotations

# --- bytes and time on the wire ---

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together."""
MAX_HEADERS = 256
HEAD_TIMEOUT_S = 20.0
"""From the first byte of a request to the end of its headers."""

BODY_IDLE_S = 60.0
BODY_GRACE_S = 30.0
BODY_BYTES_PER_S = 32 * 1024
"""A body may take BODY_GRACE_S, and longer only as far as it arrives at this rate on average."""
BODIES_IN_MEMORY = 16
"""All bodies that are held at one moment may be as large as this many of the largest."""
LINGER_S = 2.0
"""How long the rest of a refused body is read and forgotten."""

MAX_BACKLOG_BYTES = 8 * 1024 * 1024
"""What one stream may hold for a client that reads slower than its answer grows."""
STALLED_CLIENT_S = 120.0
"""A connection that takes no bytes for this long, though some wait, is cut."""
EVENTS_PER_WRITE = 128
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""An answer as a whole; beyond it a request has to stream."""

# --- JSON ---

MAX_DEPTH = 64
LARGE_BODY_BYTES = 256 * 1024
"""Larger bodies are decoded and checked in a worker thread, and their size in values is counted before."""
MAX_CONTAINERS = 2**17
MAX_MEMBERS = 2**19
MAX_VALUES = 3 * 2**20
"""Arrays and objects, members of objects, values of any kind. One decode of that many holds everybody up for some
0.2 s; the length of strings hardly counts."""

# --- fields ---

MAX_FIELDS = 1024
MAX_IGNORED_NAMES = 128
MAX_SHOWN_NAMES = 32
MAX_MESSAGES = 4096
MAX_PARTS = 16_384
MAX_TOOL_CALLS = 1024
MAX_TOOLS = 1024
MAX_NAME_CHARACTERS = 1024
MAX_ALL_NAMES_CHARACTERS = 256 * 1024
"""Names and ids of messages and tool calls: one, and all of a request together."""
MAX_TEMPLATE_ARGUMENTS = 256
MAX_TEMPLATE_ARGUMENT_BYTES = 256 * 1024
"""chat_template_kwargs: keys, and all of it as JSON."""
MAX_LOGIT_BIAS = 16_384
MAX_PROMPTS = 1024
MAX_TOTAL_CHOICES = 4096
MAX_STOP_STRINGS = 128
MAX_STOP_CHARACTERS = 4096
MAX_STOP_TOKEN_IDS = 1024

MAX_CACHE_SALT_CHARACTERS = 128
