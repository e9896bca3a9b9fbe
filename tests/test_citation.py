"""The citation is the same in all places, and has the fields of Citation File Format 1.2.0."""

from pathlib import Path

import yaml

import dcls_convert
from dcls_convert.checkpoints.card import CITATION

ROOT = Path(__file__).parent.parent
CFF = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
# From the schema, github.com/citation-file-format/citation-file-format, schema-guide.md.
REQUIRED = {"authors", "cff-version", "message", "title"}
REQUIRED_OF_REFERENCE = {"authors", "title", "type"}
ALLOWED = REQUIRED | {
    "abstract",
    "commit",
    "contact",
    "date-released",
    "doi",
    "identifiers",
    "keywords",
    "license",
    "license-url",
    "preferred-citation",
    "references",
    "repository",
    "repository-artifact",
    "repository-code",
    "type",
    "url",
    "version",
}
PERSON = {"given-names", "family-names"}
ENTITY = {"name"}


def test_the_file_has_the_fields_of_its_format():
    assert REQUIRED <= CFF.keys() <= ALLOWED
    assert (CFF["cff-version"], CFF["type"]) == ("1.2.0", "software")
    assert str(CFF["version"]) == dcls_convert.__version__
    paper = CFF["preferred-citation"]
    assert paper.keys() >= REQUIRED_OF_REFERENCE
    assert paper["type"] == "conference-paper"
    assert type(paper["year"]) is int
    assert paper["conference"].keys() == ENTITY
    assert [author.keys() for author in CFF["authors"]] == [ENTITY]
    assert all(author.keys() == PERSON for author in paper["authors"])


def test_one_line_is_marked_for_the_authors_to_fill_in():
    lines = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert sum("TO BE FILLED IN" in line for line in lines) == 1


def test_the_readme_cites_as_model_cards_do():
    assert f"```bibtex\n{CITATION}```\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    paper = CFF["preferred-citation"]
    assert f"title = {{{paper['title']}}}" in CITATION
    assert f"booktitle = {{{paper['conference']['name']}}}" in CITATION
    for author in paper["authors"]:
        assert f"{author['family-names']}, {author['given-names'][:6]}" in CITATION
