"""Rule files by their grammar, and by mutation: refused in one line, or rules that say the same when written again."""

import pytest
import yaml
from hypothesis import strategies as st

from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rules import Layer, Match, Rule, builtin_rules, claim_sites, load_rules, parse_rules

from ..planning.test_rules import net
from .campaign import Finding, refusal
from .texts import plain, texts

pytestmark = pytest.mark.campaign

ATTACKS = [
    "&a [*a]",
    "*a",
    "&a ",
    "<<: *a",
    "<<: [*a, *a, *a, *a, *a, *a, *a, *a, *a]",
    "[*a, *a, *a, *a, *a, *a, *a, *a, *a]",
    "!!python/object/apply:os.getcwd []",
    "!!binary aGk=",
    "!!set {a, b}",
    "!!timestamp 2001-12-14",
    "!!float '1'",
    "!!int '0b1'",
    "0o777",
    "190:20:30",
    "? ",
    "--- ",
    "...",
    "%YAML 1.1\n",
    "%TAG ! !!\n",
    "|\n",
    ">-\n  ",
    "- " * 300,
    "[" * 3000,
    "{a: " * 300,
    "9" * 4400,
    "(.+)+(.+)+!",
    "a{9999999999}",
    "(" * 300,
    "*" * 500,
    "[!a-" * 100,
    "\t",
    "\x85",
    "#",
    "'",
    '"',
    '"\\ud800"',
    '"\\x00"',
    ": ",
    ", ",
]
SIZES = st.one_of(st.integers(-1, 24), st.lists(st.integers(0, 12), max_size=4), st.just({"min": 3}), plain)
SIDES = {"kernel_size", "stride", "dilation", "in_channels", "out_channels", "dilated_kernel_size", "dims"}
VALUES = {
    "kind": st.sampled_from(["depthwise", "grouped", "dense", "depthwize"]),
    "path": st.sampled_from(["*", "stages.*", "*dw*"]) | texts,
    "stage_pattern": st.sampled_from([r"stage(\d)", "(?P<a>x)|y", "("]) | texts,
    "kernel_count": st.integers(-1, 90) | st.just("auto"),
    "interpolation": st.sampled_from(["bilinear", "gaussian", "cubic"]),
}


def mappings(model, **nested):
    """A mapping with some of a record's keys, and values that mostly fit them."""
    fitting = dict.fromkeys(model.model_fields, plain) | dict.fromkeys(SIDES & model.model_fields.keys(), SIZES)
    return st.fixed_dictionaries({}, optional=fitting | {k: v for k, v in (VALUES | nested).items() if k in fitting})


RULES = mappings(Rule, match=mappings(Match), name=texts, skip=texts)
FILES = st.fixed_dictionaries(
    {"format": st.sampled_from([1, 1, 1, 1, 2, "1", True]), "rules": st.lists(RULES, max_size=3)},
    optional={"defaults": mappings(Layer), "description": texts, "rulse": plain},
)


@st.composite
def grammar(draw):
    text = yaml.safe_dump(draw(FILES), allow_unicode=draw(st.booleans()), default_flow_style=draw(st.booleans()))
    return text.encode("utf-8", "surrogatepass")


@st.composite
def mutations(draw):
    """A valid file with attacks in places, in some encoding, and with some bytes changed."""
    text = draw(
        st.sampled_from([path.read_text() for path in builtin_rules().values()])
        | grammar().map(lambda data: data.decode("utf-8", "replace"))
    )
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(text)))
        end = place + draw(st.integers(0, 12))
        text = text[:place] + draw(st.sampled_from(ATTACKS) | texts) * draw(st.sampled_from([1, 1, 1, 30])) + text[end:]
    encoding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    data = bytearray(text.encode(encoding, "replace"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 3]))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def test_rule_files(campaign, tmp_path):
    convs = net()
    path = tmp_path / "rules.yaml"

    def check(data):
        path.write_bytes(data)
        rules, _ = refusal(lambda: load_rules(path))
        if rules is None:
            return
        if parse_rules(rules.text).rules != rules.rules:
            raise Finding("the text that the plan keeps says something else")
        claim_sites(rules, convs.sites)
        refusal(lambda: plan_conversion(convs, rules))

    campaign.run(grammar() | mutations(), check)
