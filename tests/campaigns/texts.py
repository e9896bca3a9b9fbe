"""Texts that have broken programs."""

import string

from hypothesis import strategies as st

HOSTILE = [
    "",
    " ",
    "\0",
    "\x1b]0;title\a",
    "\u202e",
    "\ud800",
    "\ufeff",
    "\u2028",
    "\r\n",
    "é" * 200,
    "a" * 300,
    "a" * 5000,
    "../../etc/passwd",
    "/dev/zero",
    "/dev/stdin",
    "~",
    "$(id)",
    "%s%n",
    "{0.__class__}",
    "__proto__",
    "os:system",
    "-1",
    "0",
    "1e999",
    "nan",
    "inf",
    "0x" + "f" * 5000,
    "9" * 5000,
    "1_000",
    "١٢",
    "[" * 1000,
    "{" * 1000,
    "null",
    "true",
]

texts = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=30), st.text(string.printable, max_size=60))
numbers = st.one_of(
    st.integers(-2, 60),
    st.sampled_from([10**6, 10**9, 10**18, 10**30, -(2**63), 2**31]),
    st.floats(),
    st.booleans(),
)
plain = st.recursive(
    st.one_of(st.none(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=4)),
    max_leaves=8,
)
