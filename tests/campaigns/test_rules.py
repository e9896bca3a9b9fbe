"""Rule files by their grammar, and by mutation: refused in one line, or rules that say the same when written again."""

import math
import random

import pytest
import yaml
from hypothesis import strategies as st

from dcls_convert.depthwise.geometry import MOST_CELLS
from dcls_convert.networks.sites import find_convs
from dcls_convert.planning.plan import ConversionPlan
from dcls_convert.planning.planner import plan_conversion
from dcls_convert.planning.rules import Layer, Match, Rule, builtin_rules, claim_sites, load_rules, parse_rules
from dcls_convert.planning.strict_yaml import MOST_CHARACTERS, MOST_NODES

from ..planning.test_rules import net
from .campaign import Finding, refusal
from .nets import build
from .texts import plain, texts
from .yaml_attacks import COSTLY, ENCODINGS, INSERTIONS, PATTERNS, VALUES, whole

pytestmark = pytest.mark.campaign

VARIANTS = 30  # of each text of the grammar, which take less time than the text
COSTLY_SHARE = 1 / 100
WHOLE_SHARE = 1 / 5

SIZES = st.one_of(st.integers(-1, 24), st.lists(st.integers(0, 12), max_size=4), st.just({"min": 3}), plain)
SIDES = {"kernel_size", "stride", "dilation", "in_channels", "out_channels", "dilated_kernel_size", "dims"}
FITTING = {
    "kind": st.sampled_from(["depthwise", "grouped", "dense", "depthwize"]),
    "path": st.sampled_from(["*", "stages.*", "*dw*"]) | texts,
    "stage_pattern": st.sampled_from([r"stage(\d)", "(?P<a>x)|y", "(", *PATTERNS]) | texts,
    "kernel_count": st.integers(-1, 90) | st.just("auto"),
    "interpolation": st.sampled_from(["bilinear", "gaussian", "cubic"]),
}


def mappings(model, **nested):
    """A mapping with some of a record's keys, and values that mostly fit them."""
    fitting = dict.fromkeys(model.model_fields, plain) | dict.fromkeys(SIDES & model.model_fields.keys(), SIZES)
    return st.fixed_dictionaries({}, optional=fitting | {k: v for k, v in (FITTING | nested).items() if k in fitting})


RULES = mappings(Rule, match=mappings(Match), name=texts, skip=texts)
FILES = st.fixed_dictionaries(
    {"format": st.sampled_from([1, 1, 1, 1, 2, "1", True]), "rules": st.lists(RULES, max_size=3)},
    optional={"defaults": mappings(Layer), "description": texts, "rulse": plain},
)


BUILTIN = [path.read_text() for path in builtin_rules().values()]


@st.composite
def grammar(draw):
    return yaml.safe_dump(draw(FILES), allow_unicode=draw(st.booleans()), default_flow_style=draw(st.booleans()))


def variants(drawn):
    """The text as bytes, and others with attacks in places, in some encoding, and with some bytes changed."""
    text, seed = drawn
    chance = random.Random(seed)
    yield text.encode("utf-8", "surrogatepass")
    for _ in range(VARIANTS):
        if chance.random() < COSTLY_SHARE:
            yield chance.choice(COSTLY)()
            continue
        if chance.random() < WHOLE_SHARE:
            yield whole(chance).encode("utf-8", "replace")
            continue
        found = chance.choice([text, text, chance.choice(BUILTIN)])
        for _ in range(chance.randint(0, 3)):
            found = chance.choice([_inserted, _other_value, _other_value, _line_twice])(found, chance)
        data = bytearray(found.encode(chance.choice(ENCODINGS), "replace"))
        for _ in range(chance.choice([0, 0, 0, 3])):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        yield bytes(data)


def _inserted(text, chance):
    start = chance.randint(0, len(text))
    attack = chance.choice(INSERTIONS) * chance.choice([1, 1, 1, 30])
    return text[:start] + attack + text[start + chance.randint(0, 12) :]


def _other_value(text, chance):
    """A line `key: value` with an attack as its value."""
    lines = text.split("\n")
    index = chance.randrange(len(lines))
    key, colon, _ = lines[index].partition(": ")
    lines[index] = f"{key}: {chance.choice(VALUES)}" if colon else lines[index]
    return "\n".join(lines)


def _line_twice(text, chance):
    lines = text.split("\n")
    lines.insert(chance.randrange(len(lines)), chance.choice(lines))
    return "\n".join(lines)


def key_twice(node):
    """A key that stands twice in a mapping of the text, as PyYAML read it before it made values of it."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        return next((key for key in keys if keys.count(key) > 1), None) or next(
            filter(None, (key_twice(value) for _, value in node.value)), None
        )
    return next(filter(None, map(key_twice, node.value)), None) if isinstance(node, yaml.SequenceNode) else None


def written_out(node, sizes):
    """How many values a text has, with aliases written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in sizes:
        inner = [each for pair in node.value for each in pair] if isinstance(node, yaml.MappingNode) else node.value
        sizes[id(node)] = 1 + sum(written_out(each, sizes) for each in inner)
    return sizes[id(node)]


def check_text(text):
    """What a rule file that is read has at most, by PyYAML's own nodes."""
    node = yaml.compose(text, yaml.SafeLoader)
    if len(text) > MOST_CHARACTERS:
        raise Finding(f"{len(text):,} characters are read")
    if (count := written_out(node, {})) > MOST_NODES:
        raise Finding(f"{count:,} values are read")
    if key := key_twice(node):
        raise Finding(f"key {key!r} stands twice")


def test_rule_files(campaign, tmp_path):
    convs = net(), find_convs(build(), (3, 32, 32))
    path = tmp_path / "rules.yaml"

    def check(data):
        if len(data) > 4 * MOST_CHARACTERS:  # a plan can hold what a file cannot
            refusal(lambda: parse_rules(data.decode("utf-8", "replace")))
        path.write_bytes(data)
        rules, _ = refusal(lambda: load_rules(path))
        if rules is None:
            return False
        check_text(rules.text)
        rules.model_dump_json()
        if parse_rules(rules.text).rules != rules.rules:
            raise Finding("the text that the plan keeps says something else")
        for each in convs:
            claim_sites(rules, each.sites)
            plan, _ = refusal(lambda each=each: plan_conversion(each, rules))
            if plan is not None and max(math.prod(layer.dilated_size) for layer in plan.layers) > MOST_CELLS:
                raise Finding("a layer has too many cells")
            if plan is not None and ConversionPlan.from_dict(plan.to_dict()) != plan:
                raise Finding("the plan says something else when it is written and read")
        return True

    campaign.run(st.tuples(grammar(), st.integers(0, 2**32)), check, vary=variants, folder=tmp_path)
